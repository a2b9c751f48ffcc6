"""Compare one streamed step of a tiny model with the plain transformers model."""

from __future__ import annotations

import copy
import itertools
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

import penstock.engine.engine as engine_module
from penstock.checkpoint.errors import TensorNotFoundError
from penstock.engine.engine import Engine
from penstock.engine.model_source import inspect_model
from penstock.engine.prepare import prepare
from penstock.errors import BatchError, SurveyError, UnsupportedModelError
from penstock.model.config import text_config
from penstock.model.meta_model import weight_dtype
from penstock.roles import Dtype, Role
from penstock.settings import Settings
from tests.conformance_models.tiny import FAMILIES, LARGEST_TOKEN, tiny_config
from tests.support import engines

ROWS, MICRO_BATCH, LENGTH = 4, 2, 16
BOUNDS = (0, 6, 16)
"""Boundaries of two packed documents in a row."""

DOES_NOT_RUN = "accepted, but the plain model does not run"

_EXCEPTION = re.compile(r"\b\w+Error: ")
"""A reason that only quotes another exception does not say which feature is not supported."""

_GENERIC = ("cannot be compared with its language model", "cannot be checked")
"""Reasons for exceptions that Penstock does not know, which do not name a feature either."""


@dataclass(frozen=True)
class Outcome:
    """What became of a family: `right`, `refused`, `wrong` or `crash`."""

    kind: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


class _WrongError(Exception):
    """Penstock's result differs from the plain model's."""


class _LateRefusalError(Exception):
    """A model was refused after memory had been allocated."""


def examine(case: str, folder: Path) -> Outcome:
    """Return what becomes of a family or variant.

    Models with experts are compared in fp32. In bf16, rounding changes which experts some tokens
    choose, and so gradients as a whole.
    """
    config = tiny_config(case)
    return examine_config(config, folder, "fp32" if _has_experts(config) else "bf16")


def _has_experts(config: Any) -> bool:
    try:
        text = text_config(config)
    except UnsupportedModelError:  # several parts are text models
        return False
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    inner = getattr(text, "ffn_config", None)  # of DBRX
    return any(getattr(each, name, None) for each in (text, inner) for name in names)


def examine_config(config: Any, folder: Path, dtype: Dtype = "bf16") -> Outcome:
    """Return what becomes of a model with this config, trained in `dtype`."""
    source, batch = folder / "source", _batch()
    try:
        plain = _plain_model(config, dtype)
        references = [_references(plain, each, dtype) for each in (batch, _packed(batch))]
        plain.save_pretrained(source)
        problem = ""
    except Exception as error:
        problem = _describe(error)
        shutil.rmtree(source, ignore_errors=True)
        config.save_pretrained(source)
    try:
        if problem:
            _engine(source, dtype, init="none").close()
            raise _WrongError(f"{DOES_NOT_RUN}: {problem}")
        with _engine(source, dtype) as engine, _late_refusals():
            return Outcome("right", _compare(engine, batch, references, folder))
    except (UnsupportedModelError, SurveyError) as refusal:
        reason = (
            _one_line(refusal)
            .removeprefix(f"{source}: ")
            .removeprefix(f"{source}/config.json: ")
            .replace(str(source), "the model")
        )
        generic = any(words in reason for words in _GENERIC)
        if generic or _EXCEPTION.search(reason.partition(";")[0]):
            if problem:
                return Outcome("refused", f"transformers does not run it: {problem}")
            return Outcome("wrong", f"refused without the name of a feature: {reason}")
        return Outcome("refused", reason)
    except TensorNotFoundError as missing:
        if not _lacks_tensors(source):
            return Outcome("crash", _describe(missing).replace(str(source), "the model"))
        return Outcome("refused", "transformers does not find all tensors in files that it saved")
    except (_WrongError, _LateRefusalError) as wrong:
        return Outcome("wrong", _one_line(wrong))
    except Exception as error:
        return Outcome("crash", _describe(error).replace(str(source), "the model"))


def _lacks_tensors(source: Path) -> bool:
    kind = model_class(transformers.AutoConfig.from_pretrained(source))
    return bool(kind.from_pretrained(source, output_loading_info=True)[1]["missing_keys"])


def model_class(config: Any) -> Any:
    """Return the class of a causal language model, or of a multimodal one that contains it."""
    return getattr(transformers, FAMILIES[config.model_type])


def _plain_model(config: Any, dtype: Dtype) -> Any:
    """Return the unmodified model, with weights for which every part of it matters."""
    torch.manual_seed(1)
    model = model_class(config)._from_config(copy.deepcopy(config), dtype=torch.float32)
    drawn = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=drawn)
            parameter.add_(noise * (0.15 if parameter.dim() > 1 else 0.1))
        known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name, buffer in model.state_dict().items():
            if name not in known and buffer.is_floating_point():
                buffer.mul_(1 + 0.2 * torch.rand(buffer.shape, generator=drawn))
    # The fp32 and the bf16 reference must have the same weights as Penstock. For fp32 nothing is
    # rounded: bfloat16() also rounds buffers that the model computes, such as CTRL's positions.
    return model.train() if dtype == "fp32" else model.bfloat16().train()


def _batch() -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(5)
    ids = torch.randint(3, LARGEST_TOKEN, (ROWS, LENGTH), generator=drawn)
    labels = ids.clone()
    labels[torch.rand(labels.shape, generator=drawn) < 0.2] = -100
    return {"input_ids": ids, "labels": labels}


def _packed(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the batch with rows of two documents."""
    row = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(BOUNDS)])
    return batch | {"position_ids": row.expand_as(batch["input_ids"]).clone()}


def _loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss; the model computes documents of packed rows one after another."""
    ids, labels = batch["input_ids"], batch["labels"]
    bounds = BOUNDS if "position_ids" in batch else (0, ids.shape[1])
    spans = [slice(*pair) for pair in itertools.pairwise(bounds)]
    outputs = [model(input_ids=ids[:, span], use_cache=False) for span in spans]
    logits = torch.cat([output.logits[:, :-1].float() for output in outputs], dim=1)
    targets = torch.cat([labels[:, span][:, 1:] for span in spans], dim=1)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    routed = [r for output in outputs if (r := getattr(output, "router_logits", None))]
    return loss + _router_loss(model, routed, targets) if routed else loss


def _router_loss(
    model: Any, routed: Sequence[Sequence[torch.Tensor]], targets: torch.Tensor
) -> torch.Tensor:
    """Return the auxiliary loss of routers, the mean over the tokens of micro-batches.

    `routed` has the logits of each layer, for each document of all rows.
    """
    compute = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    total = torch.zeros(())
    if compute is None:  # the class adds no such loss
        return total
    config = model.config.get_text_config()
    for rows in torch.arange(ROWS).split(MICRO_BATCH):
        logits = tuple(
            torch.cat([each.unflatten(0, (ROWS, -1))[rows].flatten(0, 1) for each in layer])
            for layer in zip(*routed, strict=True)
        )
        share = (targets[rows] != -100).sum() / (targets != -100).sum()
        experts = logits[0].shape[-1]
        total = total + share * compute(logits, experts, config.num_experts_per_tok)
    return config.router_aux_loss_coef * total


@dataclass(frozen=True)
class _Gradients:
    loss: float
    tensors: dict[str, torch.Tensor]
    routed: bool
    """Whether the loss has a part for the routers of experts."""


@dataclass(frozen=True)
class _References:
    """What the plain model computes in fp32, and in the type that Penstock computes in."""

    exact: _Gradients
    rounded: _Gradients


def _references(plain: Any, batch: dict[str, torch.Tensor], dtype: Dtype) -> _References:
    exact = _gradients(plain.float(), batch)
    return _References(exact, exact if dtype == "fp32" else _gradients(plain.bfloat16(), batch))


def _gradients(model: Any, batch: dict[str, torch.Tensor]) -> _Gradients:
    model.zero_grad()
    loss = _loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    names = _text_names(model)
    found = {
        names(name): torch.zeros_like(p, dtype=torch.float32) if p.grad is None
        else p.grad.float().clone()
        for name, p in model.named_parameters()
    }  # fmt: skip
    model.zero_grad()
    routed = bool(getattr(model.config, "output_router_logits", False))
    return _Gradients(float(loss.detach()), found, routed)


def _text_names(model: Any) -> Callable[[str], str]:
    """Return a function from the names of a multimodal model to those of its language model."""
    if model.config.get_text_config() is model.config:
        return lambda name: name
    paths = {id(module): path for path, module in model.named_modules()}
    inner, output = model.get_decoder(), model.get_output_embeddings()
    if any(module is output for module in inner.modules()):
        inner = inner.model
    decoder, head = paths[id(inner)], paths[id(output)]
    prefixes = {f"{decoder}.": "model.", f"{head}.": "lm_head."}
    return lambda name: next(
        (new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old)),
        name,
    )


def _compare(
    engine: Engine,
    batch: dict[str, torch.Tensor],
    references: Sequence[_References],
    folder: Path,
) -> str:
    alone, packed = references
    packing = _check_packed_gradients(engine, batch, packed)
    loss = float(engine.forward_backward(batch))
    largest = _check_gradients(engine, loss, alone)
    engine.apply()
    if not references[0].exact.routed:  # the routers' loss depends on all tokens of a micro-batch
        _check_causality(engine, batch)
        if not packing:
            _check_packing(engine, batch)
    _check_saved(engine, batch, folder / "source", folder / "saved")
    return f"{largest:.4f}{packing}"


@contextmanager
def _late_refusals() -> Iterator[None]:
    try:
        yield
    except (UnsupportedModelError, SurveyError) as refusal:
        raise _LateRefusalError(f"refused after memory was allocated: {refusal}") from refusal


def _engine(source: Path, dtype: Dtype, **arguments: Any) -> Engine:
    """Prepare an engine that streams everything from DRAM, in two micro-batches."""
    allocated = mock.Mock(side_effect=engine_module.allocate)
    with mock.patch.object(engine_module, "allocate", allocated):
        try:
            _, inventory = inspect_model(source, Settings())
            work = engines.workload(
                context=LENGTH, batch=ROWS, micro_batch=MICRO_BATCH, dtype=dtype
            )
            plan = engines.make_plan_of(inventory, work, "dddd")
            return prepare(source, plan=plan, device="cpu", optimizer={"lr": 1e-3}, **arguments)
        except (UnsupportedModelError, SurveyError):
            if allocated.called:
                with _late_refusals():
                    raise
            raise


def _check_packed_gradients(
    engine: Engine, batch: dict[str, torch.Tensor], references: _References
) -> str:
    """Compare a step of packed documents; return a note if the model takes none."""
    try:
        loss = float(engine.forward_backward(_packed(batch)))
    except (UnsupportedModelError, BatchError):
        return ", packed documents refused"
    try:
        _check_gradients(engine, loss, references)
    except _WrongError as wrong:
        raise _WrongError(f"packed documents: {wrong}") from None
    engine.clear_gradients()
    return ""


def _check_gradients(engine: Engine, loss: float, references: _References) -> float:
    """Compare with fp32; the plain bf16 model's own error is the measure of what is allowed."""
    exact, rounded = references.exact, references.rounded
    share = 1e-3 if exact is rounded else 1e-2  # what another order of sums may change
    allowed = 2 * abs(rounded.loss - exact.loss) + 0.1 * share * abs(exact.loss)
    if not abs(loss - exact.loss) <= allowed:
        raise _WrongError(f"loss {loss:.4f}, plain {exact.loss:.4f}, plain bf16 {rounded.loss:.4f}")
    total = sum(float(g.norm() ** 2) for g in exact.tensors.values()) ** 0.5
    names = {t.name for b in engine.inventory.blocks for t in b.tensors if t.trainable}
    exact_by, rounded_by = exact.tensors, rounded.tensors
    missing = [n for n in exact_by if n not in names and float(exact_by[n].norm()) > 0]
    if missing:
        raise _WrongError(f"no gradient of {missing[0]} and {len(missing) - 1} others")
    worst = (0.0, "")
    largest = 0.0
    for name in names:
        true, plain = exact_by[name], rounded_by[name]
        parts = [part.float().clone() for part in engine.access.parts(name, Role.GRADIENT)]
        ours = torch.cat(parts).view(true.shape)
        error, size = float((ours - true).norm()), float(true.norm())
        allowed = 2 * float((plain - true).norm()) + share * size + 0.01 * share * total
        if not error <= allowed:
            worst = max(worst, (error / max(size, 1e-4 * total), name))
        largest = max(largest, error / max(size, 1e-2 * total))
    if worst[1]:
        name = worst[1]
        raise _WrongError(
            f"gradient of {name}: relative error {worst[0]:.3g}, "
            f"plain norm {float(exact_by[name].norm()):.3g}"
        )
    return largest


def _loss_of(engine: Engine, batch: dict[str, torch.Tensor], low: int, high: int) -> float:
    """Return the loss of those columns, with the others still in the batch."""
    labels = torch.full_like(batch["input_ids"], -100)
    labels[:, low:high] = batch["input_ids"][:, low:high]
    return float(engine.evaluate([batch | {"labels": labels}]).loss)


def _check_causality(engine: Engine, batch: dict[str, torch.Tensor]) -> None:
    other = {"input_ids": batch["input_ids"].clone()}
    other["input_ids"][:, LENGTH // 2 :] = 7
    before = _loss_of(engine, {"input_ids": batch["input_ids"]}, 0, LENGTH // 2)
    after = _loss_of(engine, other, 0, LENGTH // 2)
    if abs(after - before) > 1e-5 * abs(before):
        raise _WrongError(f"not causal: later tokens change the loss {before:.4f} -> {after:.4f}")


def _check_packing(engine: Engine, batch: dict[str, torch.Tensor]) -> None:
    """Tokens of a document change no loss of the next one in the row."""
    ids = batch["input_ids"]
    first, end = BOUNDS[1], BOUNDS[2]
    packed = _packed({"input_ids": ids})
    before = _loss_of(engine, packed, first, end)
    other = {k: v.clone() for k, v in packed.items()}
    other["input_ids"][:, :first] = 7
    after = _loss_of(engine, other, first, end)
    if abs(after - before) > 1e-5 * abs(before):
        raise _WrongError(f"packed documents leak: {before:.4f} -> {after:.4f}")
    alone = _loss_of(engine, {"input_ids": ids[:, first:end]}, 0, end - first)
    if abs(alone - before) > 3e-4 * abs(alone):
        raise _WrongError(f"packed document: loss {before:.4f}, alone {alone:.4f}")


def _check_saved(engine: Engine, batch: dict[str, torch.Tensor], source: Path, saved: Path) -> None:
    """The checkpoint loads in plain transformers, with every tensor and the same loss."""
    saved.mkdir()
    engine.write(saved)
    for path in source.glob("*.json"):
        if not (saved / path.name).exists() and "index" not in path.name:
            shutil.copy(path, saved)
    kind = model_class(transformers.AutoConfig.from_pretrained(source))
    dtype = weight_dtype(engine.workload.dtype)
    model, report = kind.from_pretrained(saved, dtype=dtype, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            raise _WrongError(f"saved checkpoint: {problem} {sorted(report[problem])[0]}")
    _check_kept(kind.from_pretrained(source, dtype=dtype), model)
    mine = _loss_of(engine, {"input_ids": batch["input_ids"]}, 0, LENGTH)
    with torch.no_grad():
        loaded = float(_loss(model.train(), batch | {"labels": batch["input_ids"]}).detach())
    if not abs(mine - loaded) <= 1e-2 * abs(loaded):
        raise _WrongError(f"saved checkpoint: loss {loaded:.4f} in transformers, {mine:.4f} here")
    engine.read(saved)
    again = _loss_of(engine, {"input_ids": batch["input_ids"]}, 0, LENGTH)
    if again != mine:
        raise _WrongError(f"loaded checkpoint: loss {again:.4f}, {mine:.4f} when it was saved")


def _check_kept(before: Any, after: Any) -> None:
    """Tensors of a multimodal model outside of its text stack are saved unchanged."""
    if before.config.get_text_config() is before.config:
        return
    names, now = _text_names(before), after.state_dict()
    for name, tensor in before.state_dict().items():
        if names(name) == name != "lm_head.weight" and not torch.equal(tensor, now[name]):
            raise _WrongError(f"saved checkpoint: {name} of a tower changed")


def _one_line(problem: BaseException) -> str:
    return " ".join(str(problem).split())


def _describe(problem: BaseException) -> str:
    frames = traceback.extract_tb(problem.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    mine = [f for f in frames if "/penstock/" in f.filename]
    if mine:
        where = f"{Path(mine[-1].filename).name}:{mine[-1].lineno}, {where}"
    return f"{type(problem).__name__}: {_one_line(problem)[:240]} ({where})"
