"""Finds phases in a program that does not name them. Room: show.

Forward: hooks on the outermost modules that are alive, each on its own. Not torch's hooks on every
module: those slow each call of each layer, and make compiled models compile again. Backward, data
and saving: the functions themselves, wrapped. Update: torch's hooks on every optimizer. All of it
is taken away at the end.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

from penstock.observe.phase_tracker import Tracker

LOOKS = 8
"""How often at most the program's objects are gone through for modules, 10 to 100 ms each."""


class Patch:
    """One attribute, wrapped. Somebody who wrapped it later keeps what they have, and ours lets
    everything through."""

    def __init__(self, owner: Any, name: str, wrapped: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self._before = getattr(owner, name)
        self._ours = wrapped
        setattr(owner, name, wrapped)

    def remove(self) -> None:
        if getattr(self._owner, self._name) is self._ours:
            setattr(self._owner, self._name, self._before)


class Hooks:
    """Installed from making to `remove`."""

    def __init__(self, tracker: Tracker, note: Callable[[str], None]) -> None:
        self._tracker, self._note = tracker, note
        self._active = True
        self._patches: list[Patch] = []
        self._handles: list[Any] = []
        self._hooked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._looks_left = LOOKS
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._install()
        self.look()

    def look(self) -> None:
        """Hook modules that were not there the last time."""
        if not self._looks_left:
            return
        self._looks_left -= 1
        for module in outermost_modules():
            if module in self._hooked:
                continue
            self._hooked.add(module)
            self._handles += [
                module.register_forward_pre_hook(self._before_forward),
                module.register_forward_hook(self._after_forward, always_call=True),
            ]

    def remove(self) -> None:
        """Everything is as it was."""
        self._active = False
        for patch in reversed(self._patches):
            patch.remove()
        for handle in self._handles:
            handle.remove()
        self._patches, self._handles = [], []

    def _tell(self, call: Callable[..., None], *args: Any) -> None:
        """What goes wrong here is no business of the program's: phases end, it goes on."""
        if not self._active:
            return
        try:
            call(*args)
        except Exception as failed:
            self._active = False
            self._note(f"phases are no longer found: {failed}")

    # Functions.

    def _install(self) -> None:
        import torch
        from torch.optim import optimizer
        from torch.utils.data import dataloader

        for owner, name, phase in (
            (torch.autograd, "backward", "backward"),
            (torch.autograd, "grad", "backward"),
            (dataloader._BaseDataLoaderIter, "__next__", "data"),
            (torch, "save", "save"),
        ):
            self._patches.append(Patch(owner, name, self._around(getattr(owner, name), phase)))
        self._handles += [
            optimizer.register_optimizer_step_pre_hook(self._before_update),
            optimizer.register_optimizer_step_post_hook(self._after_update),
        ]

    def _around(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        from torch.compiler import is_compiling

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self._active or is_compiling():  # what is compiled must not hold a clock
                return function(*args, **kwargs)
            self._tell(self._enter, phase)
            try:
                found = function(*args, **kwargs)
            except StopIteration:
                self._tell(self._tracker.retract)
                raise
            except BaseException:
                self._tell(self._tracker.leave)
                raise
            self._tell(self._tracker.leave)
            return found

        return wrapped

    def _enter(self, phase: str) -> None:
        before = self._tracker.unseen_forwards
        self._tracker.enter(phase)
        if self._tracker.unseen_forwards > before:
            self.look()

    # Modules.

    def _before_forward(self, module: Any, args: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            phase = "forward" if torch.is_grad_enabled() else "evaluate"
            self._tell(self._tracker.enter, phase)

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self._tell(self._tracker.leave)

    # Optimizers.

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._tell(self._begin_update, optimizer)

    def _begin_update(self, optimizer: Any) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self.look()
        self._tracker.enter("update", id(optimizer))

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._tell(self._tracker.leave)


def outermost_modules() -> list[Any]:
    """Modules with parameters that no other one holds, as far as hooks can be had on them."""
    import torch

    kind = torch.nn.Module
    # By type: to ask an object for its class may run somebody's code.
    alive = [item for item in gc.get_objects() if issubclass(type(item), kind)]
    held = {id(child) for module in alive for child in vars(module).get("_modules", {}).values()}
    return [module for module in alive if id(module) not in held and _can_be_hooked(module)]


def _can_be_hooked(module: Any) -> bool:
    import torch

    if isinstance(module, torch.jit.ScriptModule):
        return False
    if getattr(module, "_compiled_call_impl", None) is not None:
        return False  # the hooks would be compiled too
    try:
        return next(module.parameters(), None) is not None
    except Exception:  # half made, or of a class that has its own idea of parameters
        return False
