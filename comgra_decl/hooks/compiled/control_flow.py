"""Control flow that torch compiles by itself: `torch.cond`, `scan`, `while_loop` in eager code.

They cannot run any other way. What is compiled there is kept for later calls, those of unrecorded
steps among them, so nothing of ours may be seen by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.nn.modules import module as torch_module

from comgra_decl.hooks import modes
from comgra_decl.hooks.compiled.stance import EagerStance
from comgra_decl.hooks.patches import Patch
from comgra_decl.torch_private import control_flow

GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


def untouched_control_flow() -> Patch:
    """Returns what lets it be compiled as without us, once it is applied."""
    return Patch(control_flow, "_set_compilation_env", _untouched)


@contextmanager
def _untouched(original: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    with modes.aside(), hooks_aside(), EagerStance.lifted(), original():
        yield


@contextmanager
def hooks_aside() -> Iterator[None]:
    """Takes our own hooks of all modules off for a while."""
    held = [getattr(torch_module, name) for name in GLOBAL_HOOKS]
    found = [dict(hooks) for hooks in held]
    for hooks, before in zip(held, found, strict=True):
        for key, hook in before.items():
            if is_ours(hook):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in zip(held, found, strict=True):
            now = dict(hooks)
            hooks.clear()
            hooks.update({**before, **now})


def is_ours(hook: Any) -> bool:
    """Whether a hook of all modules is one of ours."""
    return str(getattr(hook, "__module__", "")).startswith("comgra_decl.")
