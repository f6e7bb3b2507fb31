"""Training steps that are skipped under mixed precision; no optimizer hook runs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from comgra_decl.hooks.patches import Patch, run_natively


class _Stepped:
    """A hook that stores whether it was called."""

    yes = False

    def __call__(self, *_: Any) -> None:
        self.yes = True


def watch_skips(
    on_skip: Callable[[Optimizer, Any], None],
    *,
    before: Callable[[Any], None],
    on_fault: Callable[[BaseException], None],
) -> Patch:
    """Call `on_skip` with the optimizer and the scaler when `GradScaler.step` skips a step.

    `before` is called with the scaler before each such step.

    A step is skipped if a gradient is infinite or NaN after unscaling, as in the first steps of
    most training runs in float16. Only a hook on that optimizer, for the duration of the call, can
    detect this.
    """

    def step(
        original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(optimizer, Optimizer):
            return original(scaler, optimizer, *args, **kwargs)
        stepped = _Stepped()
        try:
            before(scaler)
        except Exception as error:
            on_fault(error)
        handle = optimizer.register_step_post_hook(stepped)
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            handle.remove()
        if not stepped.yes:
            try:
                on_skip(optimizer, scaler)
            except Exception as error:
                on_fault(error)
        return result

    run_natively(step, within=False)
    run_natively(_Stepped.__call__)
    return Patch(torch.amp.GradScaler, "step", step)
