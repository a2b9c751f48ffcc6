"""Parameters and gradients of a streamed model, as code that expects torch's sees them.

The values of a streamed parameter are in the tiers of an engine, where no operation of torch can
read them. `StreamedParameter` has its name, shape, type and device, and refuses everything else
with an error that says where the values are. The parameters of the head are ordinary tensors in
device memory (`HeadParameter`). The gradients of both are summed by the engine, and
`StreamedGradient` stands for such a sum: its norm can be taken, and it can be multiplied by a
number. That is what `clip_grad_norm_` of torch and accelerate do with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NoReturn, Self

import torch
from torch import nn

from penstock.engine.engine import Engine
from penstock.engine.gradients import NO_GRADIENT
from penstock.errors import EngineError
from penstock.optim.norms import GradStats

_aten = torch.ops.aten

READ = (
    "{name} has no values here: they are in the tiers of the engine ({what} needs them). Read them "
    "with model.engine.state[{name!r}]; save the model with model.save_pretrained(folder). To "
    "train with Trainer, pass it the optimizer of penstock.stream: Trainer(..., "
    "optimizers=(optimizer, None))"
)

GRADIENT = (
    "the gradient of {name} is in the tiers of the engine ({what} needs its values). You can take "
    "its norm and multiply it by a number, as torch.nn.utils.clip_grad_norm_(model.parameters(), "
    "max_norm) does; optimizer.step() and optimizer.zero_grad() use it up"
)

CHANGED = (
    "the values of {name} cannot be set or changed in place, because the engine has its own copy. "
    "Use model.load_state_dict(state), which replaces all weights"
)

_DATA: Any = torch.Tensor.data

HOOK = (
    "a hook on the gradient of {name} would not run as in torch: the engine computes and sums the "
    "gradients of a streamed model. Multiply p.grad by a number after backward(), freeze "
    "parameters before penstock.stream, or set other learning rates with param_groups"
)


class Gradients:
    """The gradients of a streamed model, by the names of parameters."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.scales: dict[str, float] = {}
        """Factors by which gradients were multiplied since they were computed."""

    def clear(self) -> None:
        """Forget all gradients."""
        self.engine.clear_gradients()
        self.engine.keeps_gradients = False
        self.scales.clear()

    def stats(self, name: str) -> GradStats:
        """Return the norm of a gradient before it was scaled. No gradients can be added then."""
        return self.engine.round_gradients().get(name, NO_GRADIENT)

    def norm(self, names: Iterable[str]) -> float:
        """Return the norm of several gradients, as exact as that of the engine's own clipping."""
        by_scale: dict[float, GradStats] = {}
        for name in names:
            scale = self.scales.get(name, 1.0)
            by_scale[scale] = by_scale.get(scale, NO_GRADIENT) + self.stats(name)
        if len(by_scale) == 1:
            ((scale, stats),) = by_scale.items()
            return stats.norm * scale
        return math.sqrt(sum(s.sum_squares * scale * scale for scale, s in by_scale.items()))

    def handle(self, parameter: torch.Tensor, name: str) -> StreamedGradient | None:
        """Return what stands for the gradient of a parameter; None if there is none."""
        if not self.engine.has_gradients or not parameter.requires_grad:
            return None
        return StreamedGradient(self, name, parameter)


class StreamedParameter(torch.Tensor):
    """A parameter whose values are in the tiers of an engine."""

    _name: str
    _gradients: Gradients

    @staticmethod
    def __new__(
        cls, name: str, gradients: Gradients, *, shape: tuple[int, ...], dtype: torch.dtype,
        device: torch.device, requires_grad: bool,
    ) -> Self:  # fmt: skip
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        made._name, made._gradients = name, gradients
        made._is_param = True  # so that isinstance(..., nn.Parameter) is true
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StreamedParameter({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise _copy_error(self._name)

    @property
    def grad(self) -> StreamedGradient | None:
        return self._gradients.handle(self, self._name)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _refuse_gradient(self._name, self.grad, value)

    def _refuse_data(self, _: Any) -> NoReturn:
        raise EngineError(CHANGED.format(name=self._name))

    data = property(_DATA.__get__, _refuse_data)

    def register_hook(self, hook: Any) -> NoReturn:
        raise EngineError(HOOK.format(name=self._name))

    def register_post_accumulate_grad_hook(self, hook: Any) -> NoReturn:
        raise EngineError(HOOK.format(name=self._name))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        mine = next((a for a in _flat(args, kwargs) if isinstance(a, cls)), None)
        assert mine is not None
        if func is _aten.detach.default:  # `p.data` and `p.detach()`, of which shapes may be asked
            return StreamedParameter(
                mine._name, mine._gradients, shape=tuple(mine.shape), dtype=mine.dtype,
                device=mine.device, requires_grad=False,
            )  # fmt: skip
        raise EngineError(READ.format(name=mine._name, what=func.__name__))


class HeadParameter(nn.Parameter):
    """A parameter of the head: an ordinary tensor whose gradient the engine sums."""

    _name: str
    _gradients: Gradients

    @classmethod
    def of(cls, name: str, gradients: Gradients, values: nn.Parameter) -> HeadParameter:
        """Return a parameter that shares the memory of `values`."""
        made = cls(values.data, requires_grad=values.requires_grad)
        made._name, made._gradients = name, gradients
        if made.requires_grad:
            torch.Tensor.register_post_accumulate_grad_hook(made, _give_to_engine)  # type: ignore[no-untyped-call]
        return made

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise _copy_error(self._name)

    @property
    def grad(self) -> StreamedGradient | None:
        return self._gradients.handle(self, self._name)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _refuse_gradient(self._name, self.grad, value)

    def _refuse_data(self, _: Any) -> NoReturn:
        raise EngineError(CHANGED.format(name=self._name))

    data = property(_DATA.__get__, _refuse_data)

    def register_hook(self, hook: Any) -> Any:
        embedding = self._gradients.engine.inventory.blocks[0].tensors
        if any(tensor.name == self._name for tensor in embedding):
            # The engine adds the other part of a tied table's gradient.
            raise EngineError(HOOK.format(name=self._name))
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Any) -> NoReturn:
        raise EngineError(HOOK.format(name=self._name))


def _give_to_engine(parameter: Any) -> None:
    """Add the gradient that autograd has accumulated to the engine's sum, which is in fp32."""
    stored: Any = torch.Tensor.grad
    gradient = stored.__get__(parameter)
    stored.__set__(parameter, None)
    parameter._gradients.engine.add_head_gradient(parameter._name, gradient.detach())


class StreamedGradient(torch.Tensor):
    """Stands for a gradient that the engine has summed."""

    _name: str
    _gradients: Gradients

    @staticmethod
    def __new__(cls, gradients: Gradients, name: str, like: torch.Tensor) -> Self:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        made._name, made._gradients = name, gradients
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StreamedGradient({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        packet, first = func.overloadpacket, args[0]
        if isinstance(first, cls):
            if func is _aten.detach.default:
                return cls(first._gradients, first._name, first)
            if packet in (_aten.linalg_vector_norm, _aten.norm) and len(args) <= 2:
                order = args[1] if len(args) == 2 else 2
                return first._norm(2.0 if order is None else float(order))
            if packet in (_aten.mul_, _aten.div_):
                first._scale_by(float(args[1]), divide=packet is _aten.div_)
                return first
        if packet is _aten._foreach_norm:
            return [gradient._norm(float(args[1]) if len(args) > 1 else 2.0) for gradient in first]
        if packet is _aten._foreach_mul_:
            factors = args[1] if isinstance(args[1], list | tuple) else [args[1]] * len(first)
            for gradient, factor in zip(first, factors, strict=True):
                gradient._scale_by(float(factor))
            return None
        mine = next(a for a in _flat(args, kwargs) if isinstance(a, cls))
        raise EngineError(GRADIENT.format(name=mine._name, what=func.__name__))

    def _norm(self, order: float) -> torch.Tensor:
        if order == 2.0:
            return GradientNorm(self._gradients, (self._name,), self.device)
        if order == math.inf:
            scale = self._gradients.scales.get(self._name, 1.0)
            largest = self._gradients.stats(self._name).max_abs * scale
            return torch.tensor(largest, dtype=torch.float32, device=self.device)
        raise EngineError(
            f"the norm of order {order} of a streamed gradient is not known; use 2 or math.inf"
        )

    def _scale_by(self, factor: float, *, divide: bool = False) -> None:
        self._gradients.stats(self._name)  # a gradient that is scaled is complete
        before = self._gradients.scales.get(self._name, 1.0)
        self._gradients.scales[self._name] = before / factor if divide else before * factor


class GradientNorm(torch.Tensor):
    """The norm of one gradient, or of several in a vector, in fp32.

    It behaves like a plain tensor of these norms, except that the norm of the vector is computed
    from the exact sums of squares instead of the rounded norms: `clip_grad_norm_` then returns the
    norm that the engine itself computes.
    """

    _names: tuple[str, ...]
    _gradients: Gradients
    _norms: torch.Tensor

    @staticmethod
    def __new__(
        cls, gradients: Gradients, names: tuple[str, ...], device: torch.device, *,
        vector: bool = False,
    ) -> Self:  # fmt: skip
        norms = [gradients.norm([name]) for name in names]
        values = torch.tensor(norms if vector else norms[0], dtype=torch.float32, device=device)
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device=device
        )
        made._names, made._gradients, made._norms = names, gradients, values
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self._norms)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        packet, first = func.overloadpacket, args[0]
        if packet is _aten.stack and all(isinstance(each, cls) for each in first):
            names = tuple(name for each in first for name in each._names)
            return cls(first[0]._gradients, names, first[0].device, vector=True)
        euclidean = len(args) == 1 or (len(args) == 2 and float(args[1]) == 2.0)
        if packet is _aten.linalg_vector_norm and euclidean and first.dim() == 1:
            norm = first._gradients.norm(first._names)
            return torch.tensor(norm, dtype=torch.float32, device=first.device)
        plain = torch.utils._pytree.tree_map_only(cls, lambda each: each._norms, (args, kwargs))
        return func(*plain[0], **(plain[1] or {}))


def _refuse_gradient(name: str, present: torch.Tensor | None, value: torch.Tensor | None) -> None:
    """Raise EngineError if a gradient is assigned; None is allowed if there is none."""
    if value is None and present is None:
        return
    if isinstance(value, StreamedGradient) and value._name == name:
        return  # `p.grad *= 0.5` assigns what it has changed in place
    raise EngineError(
        f"the gradient of {name} cannot be set: the engine sums the gradients of all parameters. "
        f"Call optimizer.zero_grad() or model.zero_grad() to forget them"
    )


def _copy_error(name: str) -> EngineError:
    return EngineError(
        f"a streamed model cannot be copied: the values of {name} are in the tiers of its engine. "
        f"Save it with model.save_pretrained(folder) and load the copy from there, for example as "
        f"the reference model of DPO; or pass the model's directory to penstock.stream again"
    )


def _flat(args: tuple[Any, ...], kwargs: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves((args, kwargs or {}))
