"""Train a small twin of the model before memory is allocated, and compare with plain training.

`penstock.model.self_check` decides whether a model's layers can be run one by one. Here the engine
itself trains the twin for three steps: weights are streamed, layers run compiled and with the
attention, the loss kernel and the type of the run, on the run's device. The same steps are made by
the unmodified transformers model with torch's AdamW and clipping, on the CPU in fp32. The
first tensor that differs by more than rounding ends `prepare` with a SelfCheckError.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.engine.device import CpuDevice, Device
from penstock.engine.step_records import observers_paused
from penstock.engine.twin_training import (
    LENGTH,
    LOSS_SCALE,
    Batch,
    PlainTraining,
    Quantity,
    Results,
    draw_batches,
    streaming_plan,
    train_with_engine,
)
from penstock.errors import PenstockError, SelfCheckError
from penstock.machine.user_cache import cache_directory, load_entry, save_entry
from penstock.model.adapters import Adapter, find_adapter
from penstock.model.attention import DOCUMENTS
from penstock.model.document_attention import register_document_attention
from penstock.model.inventory import Inventory
from penstock.model.meta_model import weight_dtype
from penstock.model.quantize import quantized_values
from penstock.model.survey import survey_model
from penstock.model.twin import (
    build_twin,
    choose_all_experts,
    is_known_code,
    twin_class,
    twin_config_of,
    twin_key,
)
from penstock.plan.plan import Plan
from penstock.plan.workload import Workload
from penstock.roles import Dtype

ROWS = 2
"""Largest number of rows in a micro-batch."""

LOSS_CHUNK, MLP_TILE = 5, 7
"""Tokens per chunk of the loss, and per tile of an MLP, if the run has several. The last ones are
smaller."""

CLIP = 0.1
"""Largest gradient norm: small enough that every step is clipped."""

EXACT: Dtype = "fp32"
"""The type in which a twin is trained on the CPU, whatever type the run has."""

FACTOR = 4.0
"""The engine may differ from plain training in fp32 by this factor more than plain training in the
type of the run does. Both round the same values, in another order: compiled layers and kernels
round less often than separate operations, a sum in tiles more often. For fp32 itself, the effect of
rounding is that of changing every weight by its last bit."""

UNIT: Mapping[Dtype, float] = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 3e-5}
"""Relative difference that is allowed in addition. With bf16 and fp16, it is the distance of two
neighbouring numbers: an engine that rounds a tensor once more than plain training differs by half
of it. With fp32, sums in another order differ by some millionths after several layers."""

SMALL = 0.01
"""This share of what all tensors of a kind may differ by together, a single one may differ by. Some
gradients are zero but for rounding: the bias of keys changes no attention weight."""

DIRECTIONS = ("gradient", "first moment")
"""What decides the direction of AdamW's update. Where one of these differs and is closer to zero
than rounding may move it, an element's update may have either sign, and is not compared: the update
of a tensor with few elements would differ by a tenth of its size if a single one turned."""

SENSITIVE = 25
"""Tokens for which rounding changes results by more units than this are replaced by others."""

SEEDS = 2
"""Number of times that tokens are drawn, at most. Twins that are sensitive to rounding mostly are
so with any tokens, and each time takes as long as the rest of the check."""

ATTEMPTS = 2
"""Number of times that a check must fail, each with other tokens. The limit comes from one sample
of rounding. With an unlucky one, a small adapter that is trained correctly differs by more."""

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """The entry of a self-check that was passed, in the user's cache."""

    paths: tuple[str, ...]
    """The ways of training that were compared with plain training."""


def self_check(
    model: nn.Module,
    inventory: Inventory,
    plan: Plan,
    device: Device,
    *,
    progress: Progress | None = None,
) -> None:
    """Raise SelfCheckError unless the engine trains a twin of the model as plain torch does.

    The model may be on the meta device, and is not changed. A check that was passed before, with
    the same config, code, versions and GPU, is not repeated.
    """
    path = inventory.layers[0].name.rpartition(".")[0]
    adapter = find_adapter(model)
    config = twin_config_of(model, path)
    if getattr(config, "output_router_logits", False):
        # Plain training computes one document at a time, and the auxiliary loss of a micro-batch
        # is no sum over its documents. `penstock.model.self_check` compares it.
        config.output_router_logits = False
    twin = _Twin(twin_class(model), config, path, inventory, adapter)
    checks = _checks(plan, device)
    key = twin_key(
        twin.model_class, twin.config, path,
        twin.freeze, twin.mixes_documents, twin.own_attention,
        [(each.where, each.device.name, asdict(each.workload), each.rounds) for each in checks],
        *([adapter.key] if adapter else []),
    )  # fmt: skip
    file = cache_directory() / "self_checks" / f"{key}.json"
    if is_known_code(twin.model_class) and load_entry(Passed, file) is not None:
        return
    with _own_settings(device.torch_device), observers_paused():
        for number, check in enumerate(checks):
            if progress is not None:
                progress(number, len(checks), f"self-check {check.where}")
            _run_check(twin, check)
    if is_known_code(twin.model_class):
        save_entry(Passed(paths=tuple(check.where for check in checks)), file)


@contextlib.contextmanager
def _own_settings(device: torch.device) -> Iterator[None]:
    """Compute with torch's defaults, whatever the caller has set, and restore that afterwards."""
    dtype, gpus = torch.get_default_dtype(), [device] if device.type == "cuda" else []
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.random.fork_rng(devices=gpus),
            torch.inference_mode(False),
            torch.enable_grad(),
            _whole_products(),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextlib.contextmanager
def _whole_products() -> Iterator[None]:
    """Compute products of fp32 numbers in fp32, also if the user allows TF32 or bf16 for them."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set another, newer switch
        before = "highest"
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# What is checked.


@dataclass(frozen=True, slots=True)
class _Check:
    """One way in which the engine trains a twin."""

    where: str
    workload: Workload
    """The workload of the run, reduced to the size of a twin."""
    rounds: int
    device: Device


def _checks(plan: Plan, device: Device) -> list[_Check]:
    """Return the check on the CPU, and the one of the run's own paths if they differ."""
    own = _reduced(plan.workload)
    plain = replace(own.numerics, compiled=False, attention="sdpa", loss_kernel="torch")
    exact = replace(own, dtype=EXACT, numerics=plain)
    rounds = min(plan.placement.rounds, own.micro_batches)
    checks = [_Check(f"on the CPU in {EXACT}", exact, rounds, CpuDevice())]
    on_cpu = device.torch_device.type == "cpu"
    if not on_cpu or own != exact:
        # The run's own device: its streams have the workspaces that the run will need anyway.
        used = CpuDevice() if on_cpu else device
        checks.append(_Check(_describe(own, device), own, rounds, used))
    return checks


def _describe(workload: Workload, device: Device) -> str:
    numerics = workload.numerics
    parts = [
        f"on {device.torch_device.type} in {workload.dtype}",
        "with compiled layers" if numerics.compiled else "",
        f"{numerics.attention} attention",
        "the fused loss kernel" if numerics.loss_kernel == "fused" else "",
    ]
    return ", ".join(filter(None, parts))


def _reduced(workload: Workload) -> Workload:
    """Return the workload with few tokens, and with several tiles and chunks if it has several."""
    numerics, rows = workload.numerics, min(workload.numerics.micro_batch, ROWS)
    tokens, of_run = rows * LENGTH, numerics.micro_batch * workload.context
    reduced = replace(
        numerics,
        micro_batch=rows,
        loss_chunk=LOSS_CHUNK if of_run > numerics.loss_chunk else tokens,
        mlp_tile=MLP_TILE if of_run > numerics.mlp_tile else tokens,
        # Plain training on the CPU cannot draw the random numbers of another device.
        neftune_noise_alpha=0.0,
    )
    return replace(
        workload,
        context=LENGTH,
        batch=rows * min(workload.micro_batches, 2),
        world=1,  # ranks are compared with one rank by the tests, not here
        # Updates and the formats of moments do not depend on the model, and lossy formats differ by
        # design. So the twin always trains with AdamW, whose moments show all gradients.
        optimizer="adamw",
        momentum=False,
        moments="fp32",
        clip=None if workload.clip is None else CLIP,
        steps=None,
        caller_loss=None,
        numerics=reduced,
    )


class _Twin:
    """The twin of a model, and what of it is trained."""

    def __init__(
        self, model_class: type, config: Any, path: str, inventory: Inventory,
        adapter: Adapter | None,
    ) -> None:  # fmt: skip
        self.model_class, self.config, self.path = model_class, config, path
        self.adapter = adapter
        self.mixes_documents = inventory.mixes_documents
        self.own_attention = inventory.own_attention
        self.freeze = _frozen(inventory, path)

    def with_all_experts(self) -> _Twin:
        """Return the twin whose tokens choose all experts."""
        other = copy.copy(self)
        other.config = choose_all_experts(self.config)
        return other

    def build(self, attention: str, dtype: torch.dtype) -> nn.Module:
        """Build the twin with an attention function, unless it has its own attention code."""
        name = None if self.own_attention else attention
        return build_twin(self.model_class, self.config, name, dtype, self.adapter)

    def survey(self, model: nn.Module) -> Inventory:
        found = survey_model(model, self.config, name="twin", blocks=self.path, freeze=self.freeze)
        return replace(
            found,
            not_trainable="",
            mixes_documents=self.mixes_documents,
            own_attention=self.own_attention,
            plain_attention=found.plain_attention and not self.own_attention,
        )


def _frozen(inventory: Inventory, path: str) -> list[str]:
    """Return patterns of tensors that are frozen; in layers, those that no layer of the run trains.

    The twin has only the first layers of the model.
    """
    outside = [
        t.name for b in inventory.blocks if b.kind != "layer" for t in b.tensors if not t.trainable
    ]
    layers: dict[str, bool] = {}
    for block in inventory.layers:
        for tensor in block.tensors:
            local = tensor.name.removeprefix(f"{block.name}.")
            layers[local] = layers.get(local, False) or tensor.trainable
    return [*outside, *(f"{path}.*.{name}" for name, trained in layers.items() if not trained)]


def _run_check(twin: _Twin, check: _Check) -> None:
    if check.workload.dtype != "fp32":
        twin = twin.with_all_experts()
    difference = None
    for attempt in range(ATTEMPTS):
        found = _find_difference(twin, check, first_seed=attempt * SEEDS)
        if found is None:
            return
        difference = difference or found
    assert difference is not None
    quantity = difference.quantity
    raise SelfCheckError(
        twin.model_class.__name__, check.where, str(difference),
        tensor=quantity.name or quantity.kind,
        difference=difference.error, limit=difference.limit,
    )  # fmt: skip


def _find_difference(twin: _Twin, check: _Check, first_seed: int) -> Difference | None:
    """Train the twin both ways, and return the first result that differs, or None."""
    plain = _train_plainly(twin, check.workload, first_seed)
    try:
        found = _train_streamed(twin, check, plain)
    except (torch.OutOfMemoryError, PenstockError):
        raise
    except Exception as problem:  # the model's own code may raise any exception
        first = (str(problem).strip().splitlines() or [""])[0]
        raise SelfCheckError(
            twin.model_class.__name__, check.where, f"{type(problem).__name__}: {first}"
        ) from problem
    return first_difference(found, plain.expected, plain.rounded, UNIT[check.workload.dtype])


def _train_streamed(twin: _Twin, check: _Check, plain: _PlainResults) -> Results:
    workload = check.workload
    if not plain.inventory.plain_attention and workload.numerics.attention == "varlen":
        workload = replace(workload, numerics=replace(workload.numerics, attention="sdpa"))
    plan = streaming_plan(plain.inventory, workload, check.rounds)
    register_document_attention()
    model = twin.build(DOCUMENTS, weight_dtype(workload.dtype))
    return train_with_engine(model, plain.inventory, plan, check.device, plain.batches)


class _PlainResults(NamedTuple):
    """The results of plain training."""

    inventory: Inventory
    batches: list[Batch]
    expected: Results
    """Computed in fp32."""
    rounded: Results
    """Computed in the type of the run."""


def _train_plainly(twin: _Twin, workload: Workload, first_seed: int) -> _PlainResults:
    """Train the unmodified twin in fp32, and in the type of the run.

    A twin may be sensitive to rounding, for example if it normalizes a state that is nearly zero
    for some tokens. Other tokens are drawn then, so that an error does not pass for rounding.
    """
    best: tuple[float, _PlainResults] | None = None
    for seed in range(first_seed, first_seed + SEEDS):
        # The engine runs without this context, as in the run: compiled code would depend on it.
        with _default_device_cpu():
            plain = _train_on_tokens(twin, workload, seed)
        sensitivity = _sensitivity(plain.expected, plain.rounded)
        if best is None or sensitivity < best[0]:
            best = sensitivity, plain
        if sensitivity < SENSITIVE * UNIT[workload.dtype]:
            break
    assert best is not None
    return best[1]


def _default_device_cpu() -> contextlib.AbstractContextManager[object]:
    """Create tensors on the CPU, whatever device the user has set as the default.

    torch's context calls Python for every operation, which takes as long as a twin's operations do.
    """
    is_default = torch.get_default_device().type == "cpu"
    return contextlib.nullcontext() if is_default else torch.device("cpu")


def _train_on_tokens(twin: _Twin, workload: Workload, seed: int) -> _PlainResults:
    rounded = twin.build("eager", weight_dtype(workload.dtype))
    exact = twin.build("eager", torch.float32)
    with torch.no_grad():
        for ours, theirs in zip(rounded.parameters(), exact.parameters(), strict=True):
            theirs.copy_(ours)
            if workload.dtype == "fp32":
                ours.copy_(torch.nextafter(ours, torch.full_like(ours, math.inf)))
    inventory = twin.survey(exact)
    for model in (rounded, exact):
        _use_quantized_values(model, inventory, workload)
    batches = draw_batches(workload.batch, not twin.mixes_documents, seed)
    scale = LOSS_SCALE if workload.dtype == "fp16" else 1.0
    results = [
        PlainTraining(model, inventory, workload, scale).train(batches)
        for model in (exact, rounded)
    ]
    return _PlainResults(inventory, batches, *results)


def _use_quantized_values(model: nn.Module, inventory: Inventory, workload: Workload) -> None:
    """Give a twin the values of the weights that the engine quantizes, in the type of the run."""
    parameters, dtype = dict(model.named_parameters()), weight_dtype(workload.dtype)
    with torch.no_grad():
        for block in workload.stored(inventory).blocks:
            for tensor in block.quantized:
                assert tensor.quantization is not None
                weight = parameters[tensor.name]
                weight.copy_(quantized_values(weight.to(dtype), tensor.quantization))


def _sensitivity(expected: Results, rounded: Results) -> float:
    """Return the largest difference by rounding, relative to all tensors of one kind and step."""
    whole = _sizes_together(expected)
    noise = _sizes_together({q: rounded[q] - expected[q] for q in expected})
    return max(noise[group] / max(whole[group], 1e-30) for group in noise)


# The comparison.


class Difference(NamedTuple):
    """A result of the engine that is not the one of plain training."""

    quantity: Quantity
    error: float
    """Size of the difference, relative to the expected result."""
    limit: float
    """The largest difference that rounding explains."""

    def __str__(self) -> str:
        return (
            f"{self.quantity} differs from plain training by {self.error:.2g} of its size, and "
            f"rounding explains {self.limit:.2g}"
        )


def first_difference(
    found: Results, expected: Results, rounded: Results, unit: float
) -> Difference | None:
    """Return the first result that differs by more than rounding explains, or None.

    `expected` is what plain training gives in fp32, `rounded` in the type of the run.
    Sizes are Euclidean norms of tensors.
    """
    assert found.keys() == expected.keys(), "the engine computed other tensors"
    noise = {quantity: rounded[quantity] - expected[quantity] for quantity in expected}
    # The difference of two losses is one number, which may be small by chance.
    largest = max((noise[q] for q in noise if q.kind == "loss"), key=_norm)
    noise |= {q: largest for q in noise if q.kind == "loss"}
    whole, whole_noise = _sizes_together(expected), _sizes_together(noise)
    unsettled: dict[str, torch.Tensor] = {}
    for quantity, tensor in expected.items():
        group = (quantity.kind, quantity.step)
        size = _norm(tensor) + SMALL * whole[group]
        limit = FACTOR * (_norm(noise[quantity]) + SMALL * whole_noise[group]) + unit * size
        difference = found[quantity] - tensor
        if quantity.kind in DIRECTIONS:
            near_zero = tensor.abs() <= limit / math.sqrt(max(tensor.numel(), 1))
            either = near_zero & (difference != 0)
            unsettled[quantity.name] = unsettled.get(quantity.name, either) | either
        elif quantity.kind == "update" and quantity.name in unsettled:
            difference = difference.masked_fill(unsettled[quantity.name], 0.0)
        error = _norm(difference)
        if not error <= limit:  # also if it is not a number
            return Difference(quantity, error / max(size, 1e-30), limit / max(size, 1e-30))
    return None


def _sizes_together(results: Results) -> dict[tuple[str, int], float]:
    """Return the size of all results of one kind and step together."""
    sizes: dict[tuple[str, int], float] = {}
    for quantity, tensor in results.items():
        group = (quantity.kind, quantity.step)
        sizes[group] = math.hypot(sizes.get(group, 0.0), _norm(tensor))
    return sizes


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))
