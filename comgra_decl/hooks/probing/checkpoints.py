"""Checkpoints: the parameters and buffers with which the forward pass of a recorded step began."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from comgra_decl.errors import ProbeError, reason_of
from comgra_decl.hooks.probing.copying import NotReadyError, check_whole, unwrapped
from comgra_decl.hooks.probing.loading import named_tensors
from comgra_decl.hooks.probing.packing import check_exact, with_packed_weights
from comgra_decl.hooks.probing.replays import ANY_SIZE, Replays
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
        extra: returns whether the step in progress is recorded only because it follows one with a
            checkpoint. Such a step is not counted.
        warn: called with the reason why there are no (further) checkpoints.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        left: Callable[[int], float | None],
        extra: Callable[[], bool],
        warn: Callable[[str], None],
    ) -> None:
        assert spec.checkpoints is not None
        self._left = left
        self._extra = extra
        self._warn = warn
        self._countdown = Countdown(spec.checkpoints, clock=time.monotonic)
        self._steps = 0  # recorded training steps so far
        self._over = False
        replay = spec.checkpoints.replay
        self._replays = None if replay is None else Replays(replay.steps, warn=warn)
        self._bytes = 0  # of all checkpoints so far
        self._models: dict[str, _Model] = {}  # by node, those called in this step
        self._slots: dict[tuple[str, str], Slot] = {}
        histogram = None if spec.histogram is None else spec.histogram.elements
        self._capture = StepCapture(
            Reducer(histogram_elements=histogram, sample_count=1),
            max_value_elements=ANY_SIZE,
            sample_count=1,
            followed=False,
        )

    # -- during a step -------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether something of the step in progress is stored if it is recorded."""
        return self._whole or self.following > 0

    @property
    def _whole(self) -> bool:
        if self._over or self._models:
            return not self._over
        return self._countdown.due(self._steps) and not self._extra()

    @property
    def following(self) -> int:
        """How many of the next steps are recorded because they may be replayed."""
        return 0 if self._replays is None or self._over else self._replays.following

    @property
    def replays(self) -> Replays | None:
        """What receives the targets and the optimizer of the step; None if it is not needed."""
        return self._replays

    def enter(
        self, module: nn.Module, plan: TopPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Read a model that is about to be called, and its arguments if the step is replayed."""
        whole = self._whole
        if whole:
            self._enter(module, plan)
        if self._replays is not None and (self._models if whole else not self._over):
            self._replays.enter(module, plan, args, kwargs, whole=whole)

    def _enter(self, module: nn.Module, plan: TopPlan) -> None:
        """Read a model, unless it was already called in this step."""
        node = plan.top.label
        if node in self._models:
            return
        try:
            with without_functions(), torch.no_grad():
                inner = unwrapped(module)
                check_whole(module, inner)
                if _has_ranks():
                    raise ProbeError("a model that several processes train has no checkpoints")
                hidden = with_packed_weights(inner)
                if hidden is not None:
                    raise ProbeError(
                        f"{hidden} keeps its weights in an object of its own, as quantized layers "
                        "do, and not in parameters or buffers"
                    )
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
        check_exact(name, tensor)
        slot = self._slots.get((node, name))
        if slot is None:
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            slot = self._slots[node, name] = Slot(
                lambda: node, name, pass_=CHECKPOINT, kind=kind, names=lambda: names
            )
        self._capture.add(slot, tensor.detach(), batch_dim=None, values=True)

    def drop(self) -> None:
        """Forget the step, which is not recorded."""
        if self._replays is not None:
            self._replays.drop()
        if self._models:
            self._capture.drop()
            self._models.clear()

    def _refuse(self, reason: str) -> None:
        self._over = True
        self.drop()
        self._warn(f"checkpoints: {reason}. The run has no checkpoints from this step on")

    # -- after a recorded step -----------------------------------------------------------------

    def ended(self, info: StepInfo, table: SlotTable) -> list[RawStep]:
        """Return the records with the checkpoint of a step, and with what it takes to replay it."""
        number, models, replays = self._steps, dict(self._models), self._replays
        self._steps += not self._extra()
        size = sum(m.nbytes for m in models.values()) + (0 if replays is None else replays.nbytes)
        if size and not self._fits(info.step, size):
            return []
        found = []
        if models:
            self._countdown.recorded(number)
            own = StepInfo(info.step, info.time, CHECKPOINT, PROBE_MODE)
            raw = self._capture.close(own, table)
            own.extra[CHECKPOINT] = {node: model.facts for node, model in models.items()}
            self._models.clear()
            if self._capture.refused:
                self._refuse("; ".join(f"{n}: {why}" for n, why in self._capture.refused.items()))
                return []
            found.append(raw)
        again = None if replays is None else replays.ended(info, table)
        return found if again is None else [*found, again]

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
