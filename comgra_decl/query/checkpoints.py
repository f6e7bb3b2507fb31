"""The checkpoints of a run: parameters and buffers of its models, as recorded at some steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import DamagedRunError, UnknownNameError, did_you_mean, is_one_of, shown
from comgra_decl.records import CHECKPOINT, REPLAY, SlotInfo

if TYPE_CHECKING:
    import torch

    from .run import Run
    from .snapshot import Snapshot


class Checkpoint(Mapping[str, NDArray[Any]]):
    """The parameters and buffers of a model at the beginning of a recorded step.

    A mapping from the names in the model's state dict to numpy arrays, which are read when they are
    accessed. Each has the dtype of the tensor; bfloat16 becomes ml_dtypes.bfloat16.

        >>> checkpoint = run.checkpoint(400)
        >>> checkpoint["conv1.weight"].shape
        (16, 3, 3, 3)
        >>> model.load_state_dict(checkpoint.torch())

    Attributes:
        step: the step.
        model: the node of the model.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        record: int,
        *,
        model: str,
        slots: Mapping[str, SlotInfo],
        facts: Mapping[str, Any],
    ) -> None:
        """Use `Run.checkpoint`."""
        self.step = int(snapshot.steps[record])
        self.model = model
        self._snapshot = snapshot
        self._record = record
        self._slots = slots
        self._names = _known(facts.get("order"), slots)
        self._temporary = _known(facts.get("temporary"), slots)

    @property
    def parameters(self) -> list[str]:
        """The names of the floating-point parameters, each with its first name."""
        found: dict[int, str] = {}
        for name in self._names:
            slot = self._slots[name]
            if slot.kind == "parameter" and "float" in slot.dtype:
                found.setdefault(slot.id, name)
        return [*found.values()]

    @property
    def temporary(self) -> dict[str, NDArray[Any]]:
        """The buffers that are not part of the state dict (`persistent=False`), by name."""
        return {name: self._read(name) for name in self._temporary}

    def torch(self) -> dict[str, torch.Tensor]:
        """Return the tensors on the CPU, as `model.load_state_dict` takes them.

        Tensors with several names are shared, as in a state dict.
        """
        made: dict[int, torch.Tensor] = {}
        for name in self._names:
            number = self._slots[name].id
            if number not in made:
                made[number] = as_tensor(self._read(name))
        return {name: made[self._slots[name].id] for name in self._names}

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return a parameter or buffer.

        Raises:
            UnknownNameError: there is none of this name; the message suggests similar names.
            DamagedRunError: it is damaged.
        """
        if name not in self._names:
            raise UnknownNameError(
                f"the checkpoint of {self.model!r} at step {self.step} has no {shown(name)}"
                f"{did_you_mean(name, self._names) or '.'}"
            )
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __repr__(self) -> str:
        return f"<Checkpoint of {self.model!r} at step {self.step}: {len(self)} tensors>"

    def _read(self, name: str) -> NDArray[Any]:
        slot = self._slots[name]
        value = self._snapshot.view.value(self._record, slot.id, 0)
        if value is None:
            if 0 in slot.shape:  # nothing to store
                return np.empty(slot.shape, _dtype(slot.dtype))
            raise DamagedRunError(f"{name!r} is missing from the checkpoint of step {self.step}")
        return np.asarray(value)


class Kept:
    """What was kept of a step so that `comgra.replay` can repeat it.

    Args:
        run: the run.
        step: the step.

    Attributes:
        facts: the description; see `records.REPLAY`. Empty if nothing was kept.
    """

    def __init__(self, run: Run, step: int) -> None:
        self._snapshot = snapshot = run._snapshot  # noqa: SLF001  (of the same package)
        self._step, self._record = step, -1
        self.facts: Mapping[str, Any] = {}
        if REPLAY in snapshot.types and step in snapshot.steps[snapshot.records(REPLAY)]:
            self._record = snapshot.record(step, REPLAY)
            found = snapshot.view.extra(self._record).get(REPLAY)
            self.facts = found if isinstance(found, dict) else {}
        node = self.facts.get("model")
        self._slots = {
            slot.key.role: slot
            for slot in snapshot.view.slots
            if slot.key.pass_ == REPLAY and slot.key.node == node
        }

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor that is part of it, on the CPU.

        Raises:
            DamagedRunError: it is missing.
        """
        slot = self._slots.get(name)
        value = None if slot is None else self._snapshot.view.value(self._record, slot.id, 0)
        if value is None:
            raise DamagedRunError(f"{name!r} is missing from what is kept of step {self._step}")
        return as_tensor(np.asarray(value))


def checkpoint_steps(snapshot: Snapshot) -> NDArray[np.int64]:
    """Return the steps that have a checkpoint, ascending."""
    if CHECKPOINT not in snapshot.types:
        return np.empty(0, np.int64)
    return np.unique(snapshot.steps[snapshot.records(CHECKPOINT)])


def checkpoint(snapshot: Snapshot, step: int, model: str | None) -> Checkpoint:
    """Return the checkpoint of a step; see `Run.checkpoint`."""
    if CHECKPOINT not in snapshot.types:
        raise UnknownNameError(
            "the run has no checkpoints; declare `checkpoints: {every: 50}` in its spec."
        )
    record = snapshot.record(step, CHECKPOINT)
    found = snapshot.view.extra(record).get(CHECKPOINT)
    models = found if isinstance(found, dict) else {}
    if model is None and len(models) == 1:
        (model,) = models
    if model is None or not is_one_of(model, models) or not isinstance(models[model], dict):
        what = "several models; pass one" if model is None else f"no model {shown(model)}; it has"
        names = ", ".join(map(repr, models))
        raise UnknownNameError(f"the checkpoint of step {step} has {what}: {names}.")
    slots: dict[str, SlotInfo] = {}
    for slot in snapshot.view.slots:
        if slot.key.pass_ == CHECKPOINT and slot.key.node == model:
            slots |= dict.fromkeys((slot.key.role, *slot.names), slot)
    return Checkpoint(snapshot, record, model=model, slots=slots, facts=models[model])


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return an array as a tensor of the same dtype, bit by bit."""
    import torch

    array = np.array(array, order="C")  # writable, and independent of what was read
    if array.dtype.isbuiltin != 1:  # a type of ml_dtypes, with the same name in torch
        bits = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]
        return torch.from_numpy(array.view(bits)).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def _known(names: object, slots: Mapping[str, SlotInfo]) -> list[str]:
    """Return the names that are slots; a run's facts are not trusted."""
    return [name for name in names if is_one_of(name, slots)] if isinstance(names, list) else []


def all_tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, including buffers that a state dict omits."""
    temporary = {name: as_tensor(value) for name, value in checkpoint.temporary.items()}
    return checkpoint.torch() | temporary


def _dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))
