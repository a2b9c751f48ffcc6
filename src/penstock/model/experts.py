"""Compute the experts of a mixture-of-experts layer, the same way in every run.

transformers keeps the experts of a layer in fused tensors, `gate_up_proj` and `down_proj` with one
matrix per expert, and lets others register the function that multiplies tokens with them. This
module registers one: tokens are sorted by expert, one grouped product computes all experts, and
each token adds up the outputs of its experts in the order of its router.

The functions of transformers give the same numbers. They are not used because the gradient of a
token is there a sum over its experts in the order in which a GPU's programs finish, or in an order
that the compiler chooses. Here, forward and backward only gather rows, and each sum has one order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

EXPERTS = "penstock"
"""Name under which transformers finds the function."""

PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of the fused matrices of experts."""

_FACTORS = "_penstock_factors"
"""Attribute of a module with experts: PEFT's wrappers of its matrices that have an adapter."""

KERNEL_ALIGNMENT = 16
"""Bytes to which the rows of matrices must be aligned for torch's grouped product."""


def register_experts() -> bool:
    """Register the function with transformers; False if it has no interface for it."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return False
    registry: Any = ALL_EXPERTS_FUNCTIONS
    registry.register(EXPERTS, experts_forward)
    return True


def use_experts_function(layers: Sequence[nn.Module]) -> None:
    """Let all modules with fused experts compute with this module's function from now on."""
    found = [module for layer in layers for module in layer.modules() if has_fused_experts(module)]
    if found and register_experts():
        for module in found:
            config: Any = module.config
            config._experts_implementation = EXPERTS


def has_fused_experts(module: nn.Module) -> bool:
    """Return whether a module's experts are computed by a registered function."""
    flags = ("is_transposed", "has_bias", "num_experts", "down_proj")
    return all(hasattr(module, name) for name in flags)


def has_experts(layer: nn.Module) -> bool:
    """Return whether a layer has fused experts."""
    return any(has_fused_experts(module) for module in layer.modules())


def add_factors(module: nn.Module, name: str, wrapper: Any) -> None:
    """Add an adapter to one of the fused matrices: PEFT's wrapper, which holds its two factors.

    It is in a dict, so that the wrapper does not become a submodule of what it wraps.
    """
    vars(module).setdefault(_FACTORS, {})[name] = wrapper


def experts_forward(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts: `[tokens, hidden size]`."""
    tokens, top_k = top_k_index.shape
    # A stable sort: the rows of an expert are in the order of tokens, on every device.
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    place = torch.argsort(order)
    offsets = _ends(experts, module.num_experts)
    if not getattr(module, "notes_are_left_to_caller", False):
        _note("offsets", offsets)
    rows = _Dispatch.apply(hidden, order, place, top_k)  # type: ignore[no-untyped-call]
    inner = _project(module, "gate_up_proj" if module.has_gate else "up_proj", rows, offsets)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = _project(module, "down_proj", inner, offsets)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    weights = top_k_weights.reshape(tokens, top_k)
    total: torch.Tensor = _Combine.apply(out, weights, order, place)  # type: ignore[no-untyped-call]
    return total.to(hidden.dtype)


def _ends(experts: torch.Tensor, count: int) -> torch.Tensor:
    """Return the end of the rows of each expert, from the sorted expert of each row."""
    numbers = torch.arange(count, device=experts.device, dtype=experts.dtype)
    return torch.searchsorted(experts, numbers, right=True).to(torch.int32)


def _project(module: Any, name: str, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each expert with its matrix, and add its bias."""
    weight = getattr(module, name)
    out = _grouped(rows.to(weight.dtype), weight, offsets, module.is_transposed)
    if module.has_bias:
        bias = getattr(module, f"{name}_bias")
        out = out + _Bias.apply(bias, offsets, rows.shape[0])  # type: ignore[no-untyped-call]
    wrapper = vars(module).get(_FACTORS, {}).get(name)
    if wrapper is not None and not wrapper.disable_adapters:
        out = out + _adapt(wrapper, module.is_transposed, rows, offsets)
    return out


def _adapt(
    wrapper: Any, transposed: bool, rows: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Multiply the rows of each expert with the two factors of its adapter.

    PEFT has the first factors of all experts in one matrix, `[experts * rank, features]`, and the
    second ones in another, `[features, rank * experts]`. The product of both has the shape of the
    expert's matrix, so which factor comes first depends on whether that is transposed.
    """
    (name,) = wrapper.active_adapters
    first, second = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    first = first.reshape(wrapper.num_experts, -1, first.shape[-1])
    second = second.reshape(second.shape[0], -1, wrapper.num_experts).permute(2, 0, 1).contiguous()
    # Versions of PEFT differ in whether they swap the two for matrices of `[outputs, inputs]`.
    if getattr(wrapper, "_did_swap_in_out_features", False) != transposed:
        inner = _grouped(rows.to(first.dtype), first, offsets, False)
        out = _grouped(inner, second, offsets, False)
    else:
        inner = _grouped(rows.to(first.dtype), second, offsets, True)
        out = _grouped(inner, first, offsets, True)
    scaled: torch.Tensor = out * wrapper.scaling[name]
    return scaled


def _grouped(
    rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, transposed: bool
) -> torch.Tensor:
    out: torch.Tensor = _GroupedLinear.apply(  # type: ignore[no-untyped-call]
        rows, weight, offsets, transposed
    )
    return out


# Autograd. Backward gathers rows where forward gathered them, with the inverse order: autograd's
# own gradient of an index adds rows in memory.


class _Dispatch(torch.autograd.Function):
    """Copy each token once for each of its experts, sorted by expert."""

    @staticmethod
    def forward(
        hidden: torch.Tensor, order: torch.Tensor, place: torch.Tensor, top_k: int
    ) -> torch.Tensor:
        return hidden[order // top_k]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, _, place, ctx.top_k = inputs
        ctx.save_for_backward(place)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return _sum_rows(gradient, place.view(-1, ctx.top_k)), None, None, None


class _Combine(torch.autograd.Function):
    """Add up the outputs of each token's experts, times their weights.

    Takes rows that are sorted by expert, `[tokens * top_k, width]`, and weights, `[tokens, top_k]`.
    """

    @staticmethod
    def forward(
        rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, place: torch.Tensor
    ) -> torch.Tensor:
        return _sum_rows(rows, place.view(weights.shape), weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights, order, place = ctx.saved_tensors
        top_k = weights.shape[1]
        scale = weights.reshape(-1)[order, None].float()
        of_rows = (gradient[order // top_k].float() * scale).to(rows.dtype)
        by_token = rows[place].view(*weights.shape, rows.shape[1])
        of_weights = (by_token.float() * gradient[:, None].float()).sum(-1).to(weights.dtype)
        return of_rows, of_weights, None, None


def _sum_rows(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return for each token the sum of its rows, in the order of `places`.

    Sums are in fp32 and rounded once. They are written term by term, which the compiler fuses into
    one kernel that reads whole rows. A sum over a dimension reads them across: on an H200, that
    took 2.5 ms for 16,384 tokens with 8 experts each, whose bytes take 0.15 ms.
    """
    total = None
    for number in range(places.shape[1]):
        term = rows[places[:, number]].float()
        if weights is not None:
            term = term * weights[:, number, None].float()
        total = term if total is None else total + term
    assert total is not None
    return total.to(rows.dtype)


class _GroupedLinear(torch.autograd.Function):
    """Multiply the rows of each group with the matrix of the group.

    `offsets` has the end of each group. Matrices are `[groups, outputs, inputs]` or, if
    `transposed`, `[groups, inputs, outputs]`.
    """

    @staticmethod
    def forward(
        rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, transposed: bool
    ) -> torch.Tensor:
        out: torch.Tensor = _grouped_mm(rows, weight if transposed else weight.mT, offsets)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        rows, weight, offsets, ctx.transposed = inputs
        ctx.save_for_backward(rows, weight, offsets)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, offsets = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_rows = of_weight = None
        # Inside of a vjp, the compiler's trace does not know what is needed. It drops what is not.
        every = torch.compiler.is_compiling()
        if every or ctx.needs_input_grad[0]:
            of_rows = _grouped_mm(gradient, weight.mT if ctx.transposed else weight, offsets)
        if every or ctx.needs_input_grad[1]:
            pair = (rows, gradient) if ctx.transposed else (gradient, rows)
            of_weight = _grouped_outer(*pair, offsets)
        return of_rows, of_weight, None, None


class _Bias(torch.autograd.Function):
    """Repeat the bias of each group for the rows of the group."""

    @staticmethod
    def forward(bias: torch.Tensor, offsets: torch.Tensor, rows: int) -> torch.Tensor:
        return bias[_groups(offsets, rows)]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (offsets,) = ctx.saved_tensors
        # As a product with zeros and ones, which sums in fp32 and in one order.
        groups = _groups(offsets, gradient.shape[0])
        numbers = torch.arange(offsets.shape[0], device=offsets.device)
        member = (groups == numbers[:, None]).to(gradient.dtype)
        return member @ gradient, None, None


def _groups(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the group of each row."""
    numbers = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, numbers, right=True)


# Grouped products. They are operations of their own, so that the compiler neither chooses a kernel
# for them by timing nor looks at the sizes of groups, which are not known before the device has
# computed them.


@torch.library.custom_op("penstock::grouped_mm", mutates_args=())
def _grouped_mm(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return `[rows, outputs]` for `[rows, inputs]` and `[groups, inputs, outputs]`."""
    if _can_use_kernel(rows, weight):
        return _kernel(rows, weight, offsets)
    out = rows.new_zeros(rows.shape[0], weight.shape[2])
    for group, (start, stop) in _spans(offsets):
        torch.mm(rows[start:stop], weight[group], out=out[start:stop])
    return out


@_grouped_mm.register_fake
def _grouped_mm_shape(
    rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@torch.library.custom_op("penstock::grouped_outer", mutates_args=())
def _grouped_outer(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return `[groups, left, right]`: the product of the rows of each group, summed over them."""
    if _can_use_kernel(left, right):
        out = _kernel(left.mT, right, offsets)
        starts = torch.cat([offsets.new_zeros(1), offsets[:-1]])
        # The kernel does not promise to write the matrix of a group without rows.
        return out.masked_fill_((starts == offsets)[:, None, None], 0)
    out = left.new_zeros(offsets.shape[0], left.shape[1], right.shape[1])
    for group, (start, stop) in _spans(offsets):
        torch.mm(left[start:stop].mT, right[start:stop], out=out[group])
    return out


@_grouped_outer.register_fake
def _grouped_outer_shape(
    left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    return left.new_empty(offsets.shape[0], left.shape[1], right.shape[1])


def _spans(offsets: torch.Tensor) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the rows of each group that has any. Waits for the device."""
    start = 0
    for group, stop in enumerate(offsets.tolist()):
        if start < stop:
            yield group, (start, stop)
        start = stop


def _can_use_kernel(*operands: torch.Tensor) -> bool:
    """Return whether torch's grouped product computes these on the device, without the host.

    It does so in bf16 on GPUs from Hopper on.
    """
    first = operands[0]
    if first.device.type != "cuda" or first.dtype is not torch.bfloat16:
        return False
    if torch.cuda.get_device_capability(first.device)[0] < 9:
        return False
    sizes = {size for each in operands for size in each.shape[-2:]} - {first.shape[0]}
    aligned = all(size * first.element_size() % KERNEL_ALIGNMENT == 0 for size in sizes)
    return aligned and all(each.data_ptr() % KERNEL_ALIGNMENT == 0 for each in operands)


def _kernel(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    functional: Any = nn.functional
    product: Any = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    out: torch.Tensor = product(left, right, offs=offsets)
    return out


# What layers say about their routing, in addition to their output.


@dataclass(frozen=True, slots=True)
class Routing:
    """What one call of a layer says about its experts; empty for a layer without any."""

    logits: Sequence[torch.Tensor] = ()
    """Output of each router, `[tokens, experts]`, if routers are tapped (`tap_routers`)."""
    offsets: Sequence[torch.Tensor] = ()
    """For each group of experts of the layer, the number of rows up to the end of each expert."""


class _Notes(threading.local):
    """Where this thread's layers put what they say; None if nobody asks.

    The attribute is set in `__init__`, which threading.local calls in every thread, so that
    compiled code can read it without a default.
    """

    def __init__(self) -> None:
        self.current: dict[str, list[torch.Tensor]] | None = None


_notes = _Notes()


@contextlib.contextmanager
def noting_routing() -> Iterator[dict[str, list[torch.Tensor]]]:
    """Collect what layers say about their routing inside the block, by field of `Routing`."""
    before = _notes.current
    found: dict[str, list[torch.Tensor]] = {"logits": [], "offsets": []}
    _notes.current = found
    try:
        yield found
    finally:
        _notes.current = before


def _note(name: str, tensor: torch.Tensor) -> None:
    found = _notes.current
    if found is not None:
        found[name].append(tensor)


def note_rows(module: Any, choices: torch.Tensor) -> None:
    """Note the rows of experts, from the choices of all tokens of a batch."""
    if _notes.current is not None:
        chosen = choices.reshape(-1).sort().values
        _note("offsets", _ends(chosen, module.num_experts))


def leave_notes_to_caller(module: Any) -> None:
    """Let experts note nothing by themselves from now on: they see only a part of a batch.

    A flag of the module, because compiled code is split where a global variable is changed.
    """
    module.notes_are_left_to_caller = True


def tap_routers(model: nn.Module, layers: Sequence[nn.Module]) -> int:
    """Let the routers of layers note their logits from now on; return how many there are.

    The model's class names its routers, as it does for `output_router_logits`.
    """
    taps = 0
    for recorder in _recorders(model):
        for layer in layers:
            for path, module in layer.named_modules():
                wanted = recorder.layer_name is None or f".{recorder.layer_name}." in f".{path}."
                if isinstance(module, recorder.target_class) and wanted:
                    module.register_forward_hook(_Tap(recorder.index))
                    taps += 1
    return taps


def _recorders(model: nn.Module) -> list[Any]:
    """Return where transformers finds router logits in a model."""
    for module in model.modules():
        found = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if found is not None:
            every = found if isinstance(found, list) else [found]
            return [each for each in every if hasattr(each, "target_class")]
    return []


class _Tap:
    """Note one of the outputs of a router."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        logits = output[self.index] if isinstance(output, tuple | list) else output
        _note("logits", logits.flatten(0, -2))
