"""Run the program's code without any effect on the program or on tracing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.modules import module as torch_module

from comgra_decl.hooks.other_threads import this_thread
from comgra_decl.torch_private import (
    DeviceMode,
    dispatch_modes,
    function_mode_at,
    function_modes,
    pop_function_mode,
    push_function_mode,
    without_dispatch_modes,
)

_SEED = 0
"""Seed of the generators while a copy runs. With the same random numbers at every record, pictures
change only because the model changes."""

_FULL_BACKWARD = "_global_is_full_backward_hook"
"""Where torch stores which kind of global backward hook the program uses."""

SECLUDED: set[int] = set()
"""The threads that run a copy. Callers test it before `is_secluded`, which saves a call per hook in
programs without probes."""


def is_secluded() -> bool:
    """Return whether this thread runs a copy of a model, which tracing must not observe."""
    return this_thread.number in SECLUDED


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a device type in the program."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> Autocast:
        """Return the state that is in effect."""
        return cls(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def again(self) -> torch.autocast:
        """Return a context with the same state, without the cache of cast weights."""
        return torch.autocast(
            self.device, dtype=self.dtype, enabled=self.enabled, cache_enabled=False
        )


@contextmanager
def secluded(device: torch.device) -> Iterator[None]:
    """Run the program's code without effects on the program, except on the objects it uses.

    The generators of torch (on the CPU and on `device`), numpy and Python are seeded, and restored
    afterwards. Function and dispatch modes, both tracing's and the program's, are suspended, except
    for `with torch.device(...)`, on which the code may depend. Tracing's hooks and annotations have
    no effect in this thread.
    """
    mine = this_thread.number
    outer = mine in SECLUDED
    cuda = [device.index or 0] if device.type == "cuda" else []
    with ExitStack() as stack:
        SECLUDED.add(mine)
        if not outer:
            stack.callback(SECLUDED.discard, mine)
        stack.enter_context(_outside_of_modes())
        stack.enter_context(generators_kept(cuda))
        _seed(cuda)
        stack.enter_context(_slow_path_of_attention())
        yield


@contextmanager
def unseen() -> Iterator[None]:
    """Hide the calls of modules in this thread from tracing."""
    mine = this_thread.number
    outer = mine in SECLUDED
    SECLUDED.add(mine)
    try:
        yield
    finally:
        if not outer:
            SECLUDED.discard(mine)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run a copy, observed by a tracer of its own, without effects on the program.

    Unlike in `secluded`, a tracer started inside observes the code, and random numbers are those
    that the program would draw next. The generators are restored afterwards. The program's modes
    and global module hooks are suspended in the meantime, for all threads in the case of hooks.
    """
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with ExitStack() as stack:
        stack.enter_context(_outside_of_modes())
        stack.enter_context(generators_kept(list(cuda)))
        stack.enter_context(without_global_hooks())
        stack.enter_context(_slow_path_of_attention())
        yield


@contextmanager
def _outside_of_modes() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        if dispatch_modes():
            stack.enter_context(without_dispatch_modes())
        stack.enter_context(_without_function_modes())
        yield


@contextmanager
def without_global_hooks() -> Iterator[None]:
    """Suspend the global hooks of modules; those registered meanwhile stay."""
    names = [name for name in vars(torch_module) if name.startswith("_global_")]
    tables = [t for name in names if isinstance(t := getattr(torch_module, name), dict)]
    full = getattr(torch_module, _FULL_BACKWARD, None)
    found = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, before in zip(tables, found, strict=True):
            now = dict(table)
            table.clear()
            table.update({**before, **now})
        setattr(torch_module, _FULL_BACKWARD, full)


@contextmanager
def _without_function_modes() -> Iterator[None]:
    before = [function_mode_at(i) for i in range(function_modes())]
    _stack([mode for mode in before if isinstance(mode, DeviceMode)])
    try:
        yield
    finally:
        _stack(before)


def _stack(modes: list[object]) -> None:
    for _ in range(function_modes()):
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)


def _seed(cuda: list[int]) -> None:
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.default_generator.manual_seed(_SEED)
    for index in cuda:
        torch.cuda.default_generators[index].manual_seed(_SEED)


@contextmanager
def generators_kept(cuda: list[int]) -> Iterator[None]:
    """Restore the generators of Python, numpy and torch, and those of CUDA devices, afterwards."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


@contextmanager
def _slow_path_of_attention() -> Iterator[None]:
    """Make transformer layers call their parts, which a native kernel would compute in one call."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
