"""Probes that take the places of a model's layers, so that what is around the layers can run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a layer, without the hidden states."""


class _ReachedError(Exception):
    """Raised by the last probe to leave the model before its head runs."""


class _TuplesExpectedError(Exception):
    """Raised by a probe if the model selects the first element of what a layer returns."""


class _OnlyOutput:
    """The output of a model's only layer, which shows what the model does with it.

    Between two layers, the second one's input shows whether the model selected the first element.
    After an only layer there is no such input.
    """

    def __getitem__(self, index: Any) -> Any:
        # A model that selects positions of a tensor uses slices.
        raise _TuplesExpectedError if index == 0 else _ReachedError

    def __iter__(self) -> Any:
        raise _ReachedError  # ModelOutput tries whether it can iterate over its first field

    def __getattr__(self, name: str) -> Any:
        raise _ReachedError

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise _ReachedError


class LayerProbe(nn.Module):
    """Takes the place of a layer, records how the model calls it, and returns its input."""

    def __init__(self, probes: LayerProbes, index: int, kind: str | None) -> None:
        super().__init__()
        self._probes, self._index = probes, index
        self.hidden: torch.Tensor | None = None
        """The hidden states that the model passed."""
        self.arguments: Arguments = ((), {})
        if kind is not None:
            self.attention_type = kind  # some models read it before they call the layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        others = dict(kwargs)
        hidden = args[0] if args else others.pop("hidden_states")
        before = self._probes.each[self._index - 1].hidden if self._index > 0 else None
        if before is not None and hidden.dim() < before.dim():
            raise _TuplesExpectedError
        self.hidden, self.arguments = hidden, (tuple(args[1:]), others)
        if self._index == len(self._probes.each) - 1:
            if self._index == 0 and not self._probes.return_tuples:
                return _OnlyOutput()
            raise _ReachedError
        return self._probes.output(hidden)


class _HeadProbe(nn.Module):
    """Takes the place of all layers, and returns `answer` as their output."""

    def __init__(self, probes: LayerProbes) -> None:
        super().__init__()
        self._probes = probes
        self.answer: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.answer is not None
        return self._probes.output(self.answer)


class LayerProbes:
    """Probes in the place of the layers at `path` of a model."""

    def __init__(self, model: nn.Module, path: str) -> None:
        parent, _, self._list_name = path.rpartition(".")
        self.base = model.get_submodule(parent)
        """The module that owns the list of layers, and calls them."""
        layers = model.get_submodule(path)
        assert isinstance(layers, nn.ModuleList)
        self.each = [
            LayerProbe(self, index, getattr(layer, "attention_type", None))
            for index, layer in enumerate(layers)
        ]
        """The probe of each layer."""
        self._list = nn.ModuleList(self.each)
        self._head_probe = _HeadProbe(self)
        self._head_only = nn.ModuleList([self._head_probe])
        self.return_tuples = False
        """Whether the model's layers return tuples; known after `enter`."""

    def install(self) -> None:
        """Take the layers out of the model."""
        setattr(self.base, self._list_name, self._head_only)

    @contextlib.contextmanager
    def head_installed(self) -> Iterator[None]:
        """Take the layers out of the model inside the block."""
        layers = getattr(self.base, self._list_name)
        self.install()
        try:
            yield
        finally:
            setattr(self.base, self._list_name, layers)

    def output(self, hidden: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor]:
        """Return hidden states in the form in which the layers of the model return them."""
        return (hidden,) if self.return_tuples else hidden

    def enter(self, **inputs: Any) -> tuple[torch.Tensor, list[Arguments]]:
        """Run the model up to its last layer; return the first one's input, and all arguments."""
        setattr(self.base, self._list_name, self._list)
        try:
            self._run(inputs)
        except _TuplesExpectedError:
            self.return_tuples = True
            self._run(inputs)
        finally:
            self.install()
        hidden = self.each[0].hidden
        assert hidden is not None, "the model calls no layer"
        return hidden, [probe.arguments for probe in self.each]

    def _run(self, inputs: dict[str, Any]) -> None:
        self.clear()
        with contextlib.suppress(_ReachedError):
            self.base(**inputs)

    def clear(self) -> None:
        """Drop the hidden states and arguments of the last run."""
        for probe in self.each:
            probe.hidden, probe.arguments = None, ((), {})

    def run_head(self, hidden: torch.Tensor, model: Callable[[], Any]) -> Any:
        """Return what the model returns if `hidden` is the output of its last layer."""
        self._head_probe.answer = hidden
        try:
            return model()
        finally:
            self._head_probe.answer = None

    def first_change(self) -> int | None:
        """Return the first layer after which the last run changed the hidden states, or None."""
        for index, probe in enumerate(self.each[1:]):
            if probe.hidden is not self.each[index].hidden:
                return index
        return None
