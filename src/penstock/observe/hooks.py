"""Find the phases of a program that does not name them.

- Forward: hooks on the outermost modules that are alive, each registered on the module itself. The
  global module hooks of torch would slow every call of every layer, and make compiled models
  compile again.
- Backward, data loading and saving: the functions are wrapped.
- Update: torch's global optimizer hooks.

`Hooks.remove` undoes all of it.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

from penstock.observe.phase_tracker import PhaseTracker

MAX_SEARCHES = 8
"""How often the program's objects are searched for modules. A search takes 10 to 100 ms."""


class Patch:
    """One attribute that is replaced by a wrapper.

    If another library has wrapped it again in the meantime, `remove` leaves that in place; our
    wrapper then only passes calls through.
    """

    def __init__(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self._original = getattr(owner, name)
        self._wrapper = wrapper
        setattr(owner, name, wrapper)

    def remove(self) -> None:
        if getattr(self._owner, self._name) is self._wrapper:
            setattr(self._owner, self._name, self._original)


class Hooks:
    """Reports the program's forwards, backwards, updates, data loading and saves to a tracker.

    The hooks are installed by the constructor and removed by `remove`.
    """

    def __init__(self, tracker: PhaseTracker, note: Callable[[str], None]) -> None:
        self._tracker, self._note = tracker, note
        self._active = True
        self._patches: list[Patch] = []
        self._handles: list[Any] = []
        self._hooked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._searches_left = MAX_SEARCHES
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._install()
        self.hook_modules()

    def hook_modules(self) -> None:
        """Hook the modules that have been created since the last search."""
        if not self._searches_left:
            return
        self._searches_left -= 1
        for module in outermost_modules():
            if module in self._hooked:
                continue
            self._hooked.add(module)
            self._handles += [
                module.register_forward_pre_hook(self._before_forward),
                module.register_forward_hook(self._after_forward, always_call=True),
            ]

    def remove(self) -> None:
        """Restore everything that was changed in the program."""
        self._active = False
        for patch in reversed(self._patches):
            patch.remove()
        for handle in self._handles:
            handle.remove()
        self._patches, self._handles = [], []

    def _report(self, call: Callable[..., None], *args: Any) -> None:
        """Call the tracker. If it fails, stop tracking phases; the program must not notice."""
        if not self._active:
            return
        try:
            call(*args)
        except Exception as failed:
            self._active = False
            self._note(f"phases are no longer tracked: {failed}")

    # Wrapped functions.

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
            self._patches.append(Patch(owner, name, self._wrap(getattr(owner, name), phase)))
        self._handles += [
            optimizer.register_optimizer_step_pre_hook(self._before_update),
            optimizer.register_optimizer_step_post_hook(self._after_update),
        ]

    def _wrap(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        from torch.compiler import is_compiling

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            # While torch.compile traces, a timestamp would be compiled into the graph.
            if not self._active or is_compiling():
                return function(*args, **kwargs)
            self._report(self._enter, phase)
            try:
                result = function(*args, **kwargs)
            except StopIteration:
                self._report(self._tracker.cancel)
                raise
            except BaseException:
                self._report(self._tracker.leave)
                raise
            self._report(self._tracker.leave)
            return result

        return wrapper

    def _enter(self, phase: str) -> None:
        before = self._tracker.unseen_forwards
        self._tracker.enter(phase)
        if self._tracker.unseen_forwards > before:
            self.hook_modules()

    # Module hooks.

    def _before_forward(self, module: Any, args: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            phase = "forward" if torch.is_grad_enabled() else "evaluate"
            self._report(self._tracker.enter, phase)

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self._report(self._tracker.leave)

    # Optimizer hooks.

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._report(self._begin_update, optimizer)

    def _begin_update(self, optimizer: Any) -> None:
        # A new optimizer suggests that there is a new model.
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self.hook_modules()
        self._tracker.enter("update", id(optimizer))

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._report(self._tracker.leave)


def outermost_modules() -> list[Any]:
    """Find the modules with parameters that no other module contains and that can be hooked."""
    import torch

    module_type = torch.nn.Module
    # `isinstance` would ask each object for its `__class__`, which may run the program's own code.
    alive = [item for item in gc.get_objects() if issubclass(type(item), module_type)]
    inner = {id(child) for module in alive for child in vars(module).get("_modules", {}).values()}
    return [module for module in alive if id(module) not in inner and _can_be_hooked(module)]


def _can_be_hooked(module: Any) -> bool:
    import torch

    if isinstance(module, torch.jit.ScriptModule):
        return False
    if getattr(module, "_compiled_call_impl", None) is not None:
        return False  # the hooks would be compiled too
    try:
        return next(module.parameters(), None) is not None
    except Exception:  # partly constructed, or with its own definition of `parameters`
        return False
