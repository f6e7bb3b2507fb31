"""Control flow that torch always compiles, even in eager code: `torch.cond`, `scan`, `while_loop`.

Later calls reuse the compiled code, including calls in unrecorded steps, so it must not contain any
tracing code.
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
    """Return a patch under which control flow is compiled exactly as without tracing."""
    return Patch(control_flow, "_set_compilation_env", _untouched)


@contextmanager
def _untouched(original: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    with modes.aside(), hooks_aside(), EagerStance.lifted(), original():
        yield


@contextmanager
def hooks_aside() -> Iterator[None]:
    """Temporarily remove our own global module hooks."""
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
    """Whether a global module hook belongs to comgra_decl."""
    return str(getattr(hook, "__module__", "")).startswith("comgra_decl.")
