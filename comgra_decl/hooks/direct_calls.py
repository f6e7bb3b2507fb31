"""Direct calls to `module.forward(x)`, for which torch runs no hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from comgra_decl.hooks.call_context import is_no_step
from comgra_decl.hooks.objects import instances_of
from comgra_decl.hooks.other_threads import this_thread
from comgra_decl.hooks.patches import Patch
from comgra_decl.torch_private import loaded

Before = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]
After = Callable[[nn.Module, tuple[Any, ...], Any], None]


class DirectCalls:
    """Reports calls to `forward` that bypass the call to the module.

    Replaces `forward` with a wrapper. Some records wrap all classes of the program; others wrap
    only the classes whose `forward` has been called directly. Torch's own classes are wrapped only
    if their `forward` appears to be called directly.

    Args:
        before: called with (module, args, kwargs) before such a call; must not raise.
        after: called with (module, args, output) after it; the output is None if the call failed.

    Attributes:
        entered: per thread, the module called last, whose `forward` runs next.
    """

    def __init__(self, *, before: Before, after: After) -> None:
        self._before = before
        self._after = after
        self._seen: set[type] = set()
        self._patches: dict[type, Patch] = {}  # by the class that defines `forward`
        self._called: set[type] = set()  # classes whose `forward` was called directly
        self._searched = self._all = False
        self._settled: object = None  # what determined which wrappers are in place
        # Keyed by thread rather than a `threading.local`, so that each record can clear it.
        self.entered: dict[int, nn.Module] = {}
        self._running: dict[int, list[nn.Module]] = {}  # modules whose `forward` is running

    def install(self, *, all_classes: bool) -> None:
        """Apply the wrappers; a later call changes which classes are wrapped.

        Args:
            all_classes: whether to wrap all classes, or only those whose `forward` was called
                directly.
        """
        if not self._searched:
            self._searched = True
            for module in instances_of(nn.Module):
                self.note(type(module))
        self._all = all_classes
        self._forget_calls()
        # Runs for each recorded step. Classes are only ever added, so comparing counts is enough.
        deciding = all_classes, len(self._patches), len(self._called)
        if deciding == self._settled:
            return
        for owner, patch in self._patches.items():
            (patch.apply if all_classes or owner in self._called else patch.restore)()
        self._settled = deciding

    def remove(self) -> None:
        """Restore the original `forward` of all classes."""
        self._all = False
        self._settled = None
        self._forget_calls()
        for patch in self._patches.values():
            patch.restore()

    def _forget_calls(self) -> None:
        """Discard the calls in the previous step, some of which may never have returned."""
        self.entered.clear()
        self._running.clear()

    def _running_here(self) -> list[nn.Module]:
        return self._running.setdefault(this_thread.number, [])

    def forget(self) -> None:
        """Restore the original `forward` of all classes, and drop all references to them."""
        self.remove()
        self._seen.clear()
        self._called.clear()
        self._patches.clear()
        self._searched = False

    def follow(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Report a call that began before the wrappers were applied; `followed` ends it."""
        self._before(module, args, kwargs)
        self._running_here().append(module)

    def followed(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Report the end of a call reported by `follow`; `output` is None if the call failed."""
        running = self._running_here()
        running[:] = [each for each in running if each is not module]  # modules may define `==`
        self._after(module, args, output)

    def note(self, kind: type) -> None:
        """Register the class of a module, and wrap its `forward` if all classes are wrapped."""
        if kind in self._seen:
            return
        self._seen.add(kind)
        owner = forward_owner(kind)
        if owner is not None and owner not in self._patches:
            patch = self._patches[owner] = Patch(owner, "forward", partial(self._forward, owner))
            if self._all:
                patch.apply()

    def suspect(self, kind: type) -> None:
        """Wrap a class from the next record on, even if it is one of torch's own.

        Called for the classes of modules that have gradients although they were not called.
        """
        owner = forward_owner(kind, own=False)
        if owner is not None:
            self._called.add(owner)
            if owner not in self._patches:
                self._patches[owner] = Patch(owner, "forward", partial(self._forward, owner))

    def _forward(self, owner: type, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = args[0] if args else None
        if not isinstance(module, nn.Module) or is_no_step():
            return original(*args, **kwargs)
        running = self._running_here()
        if self.entered.get(this_thread.number) is module:
            del self.entered[this_thread.number]
        elif any(each is module for each in running):
            return original(*args, **kwargs)  # `super().forward(x)`
        elif not _is_traced_by_fx():
            self._called.add(owner)
            return self._direct(module, original, args, kwargs)
        running.append(module)
        try:
            return original(*args, **kwargs)
        finally:
            running.pop()

    def _direct(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        given, output = args[1:], None
        self._before(module, given, kwargs)
        self.entered.pop(this_thread.number, None)
        running = self._running_here()
        running.append(module)
        try:
            output = original(*args, **kwargs)
        finally:
            running.pop()
            self._after(module, given, output)
        return output


def _is_traced_by_fx() -> bool:
    fx: Any = loaded("fx_tracing")
    return bool(getattr(fx, "_is_fx_tracing_flag", False))


def forward_owner(kind: type, *, own: bool = True) -> type | None:
    """Return the class that defines the `forward` of a module class.

    Args:
        kind: the module class.
        own: whether to exclude classes of torch.

    Returns:
        The class, or None if its `forward` cannot be wrapped or is excluded by `own`.
    """
    for owner in kind.__mro__:
        forward = vars(owner).get("forward")
        if forward is not None:
            refused = owner is nn.Module or issubclass(kind, torch.jit.ScriptModule)
            foreign = own and f"{owner.__module__}.".startswith("torch.")
            return owner if isinstance(forward, FunctionType) and not (refused or foreign) else None
    return None
