"""Checkpoints: the parameters and buffers with which the forward pass of a recorded step began."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from comgra_decl.errors import ProbeError, reason_of
from comgra_decl.hooks.probing.copying import NotReadyError, check_whole, unwrapped
from comgra_decl.hooks.probing.loading import named_tensors
from comgra_decl.hooks.schedule.countdown import Countdown
from comgra_decl.hooks.tensors.capture import StepCapture
from comgra_decl.hooks.tensors.slots import Slot
from comgra_decl.records import CHECKPOINT, PROBE_MODE, RawStep, StepInfo
from comgra_decl.stats import Reducer
from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from comgra_decl.hooks.plans import TopPlan
    from comgra_decl.hooks.tensors.slots import SlotTable
    from comgra_decl.spec import Spec

_ANY_SIZE = 1 << 62

_EXACT = frozenset(
    dtype
    for name in (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
        "complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz"
    ).split()
    if (dtype := getattr(torch, name, None)) is not None
)
"""The dtypes that the store keeps bit by bit."""

_TOO_LARGE = (
    "the checkpoint of step {} needs {:.3g} MB, which is more than half of the {:.3g} MB that "
    "schedule.budget.disk leaves; no further checkpoints are stored"
)


class Checkpoints:
    """Stores the models of some recorded training steps, as records of their own type.

    All tensors are read when a model is first called in a step, before any of it has run. A tensor
    with several names is stored once.

    Args:
        spec: the spec of the run, which declares checkpoints.
        left: returns how many bytes the run's disk budget leaves, given how many bytes of
            checkpoints may not be on disk yet; None if there is no limit.
        warn: called with the reason why there are no (further) checkpoints.
    """

    def __init__(
        self, spec: Spec, *, left: Callable[[int], float | None], warn: Callable[[str], None]
    ) -> None:
        assert spec.checkpoints is not None
        self._left = left
        self._warn = warn
        self._countdown = Countdown(spec.checkpoints, clock=time.monotonic)
        self._steps = 0  # recorded training steps so far
        self._over = False
        self._bytes = 0  # of all checkpoints so far
        self._models: dict[str, _Model] = {}  # by node, those called in this step
        self._slots: dict[tuple[str, str], Slot] = {}
        histogram = None if spec.histogram is None else spec.histogram.elements
        self._capture = StepCapture(
            Reducer(histogram_elements=histogram, sample_count=1),
            max_value_elements=_ANY_SIZE,
            sample_count=1,
            followed=False,
        )

    # -- during a step -------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether the step in progress gets a checkpoint if it is recorded."""
        return not self._over and (bool(self._models) or self._countdown.due(self._steps))

    def enter(self, module: nn.Module, plan: TopPlan) -> None:
        """Read a model that is about to be called, unless it was already called in this step."""
        node = plan.top.label
        if node in self._models:
            return
        try:
            with without_functions(), torch.no_grad():
                inner = unwrapped(module)
                check_whole(module, inner)
                if _has_ranks():
                    raise ProbeError("a model that several processes train has no checkpoints")
                model = _Model(inner)
                if not self._models:
                    self._capture.begin()
                for name, tensor in model.tensors.items():
                    self._read(node, name, tensor, names=model.names(name))
        except NotReadyError:
            return
        except Exception as error:
            self._refuse(reason_of(error))
            return
        self._models[node] = model

    def _read(self, node: str, name: str, tensor: torch.Tensor, *, names: tuple[str, ...]) -> None:
        plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_quantized or tensor.dtype not in _EXACT:
            what = f"{type(tensor).__name__}, {tensor.dtype}, {tensor.layout}"
            raise ProbeError(f"{name} cannot be stored without changing it ({what})")
        slot = self._slots.get((node, name))
        if slot is None:
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            slot = self._slots[node, name] = Slot(
                lambda: node, name, pass_=CHECKPOINT, kind=kind, names=lambda: names
            )
        self._capture.add(slot, tensor.detach(), batch_dim=None, values=True)

    def drop(self) -> None:
        """Forget the step, which is not recorded."""
        if self._models:
            self._capture.drop()
            self._models.clear()

    def _refuse(self, reason: str) -> None:
        self._over = True
        self.drop()
        self._warn(f"checkpoints: {reason}. The run has no checkpoints from this step on")

    # -- after a recorded step -----------------------------------------------------------------

    def ended(self, info: StepInfo, table: SlotTable) -> RawStep | None:
        """Return the record with the checkpoint of a recorded training step, if it has one."""
        number, models = self._steps, dict(self._models)
        self._steps += 1
        if not models or not self._fits(info.step, sum(m.nbytes for m in models.values())):
            return None
        self._countdown.recorded(number)
        own = StepInfo(info.step, info.time, CHECKPOINT, PROBE_MODE)
        raw = self._capture.close(own, table)
        own.extra[CHECKPOINT] = {node: model.facts for node, model in models.items()}
        self._models.clear()
        if self._capture.refused:
            self._refuse("; ".join(f"{n}: {why}" for n, why in self._capture.refused.items()))
            return None
        return raw

    def _fits(self, step: int, size: int) -> bool:
        """Return whether the disk budget has room for a checkpoint."""
        left = self._left(self._bytes)
        self._bytes += size
        if left is None or 2 * size <= left:
            return True
        self._over = True
        self.drop()
        self._warn(_TOO_LARGE.format(step, size / 1e6, max(0.0, left) / 1e6))
        return False


class _Model:
    """A model, as it is called.

    Attributes:
        tensors: its parameters and buffers, each under its first name.
        nbytes: their size.
        facts: what a checkpoint needs besides its tensors; see `records.CHECKPOINT`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[str, list[str]] = {}
        first: dict[int, str] = {}
        self.facts: dict[str, list[str]] = {"order": [], "temporary": []}
        for name, tensor, persistent in named_tensors(module):
            known = first.setdefault(id(tensor), name)
            self.tensors.setdefault(known, tensor)
            self._names.setdefault(known, []).append(name)
            self.facts["order" if persistent else "temporary"].append(name)
        self.nbytes = sum(t.numel() * t.element_size() for t in self.tensors.values())

    def names(self, name: str) -> tuple[str, ...]:
        """Return all names of a tensor."""
        return tuple(self._names[name])


def _has_ranks() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
