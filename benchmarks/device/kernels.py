"""What runs on the device for a record: how many kernels, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.device.places import Place
from benchmarks.device.recording import RECORD, reduced
from benchmarks.nets import Training
from comgra_decl.stats import Reducer

_MOST_COPIES = 8


def launched(place: Place, training: Training) -> tuple[int, int]:
    """Returns how many kernels a plain step launches, and a recorded one."""

    def work() -> None:
        training.step()

    training.reset()
    for _ in range(3):
        training.step()
    plain = len(place.kernels(work))
    training.reset()
    with reduced(RECORD, later=True) as recording:
        for _ in range(3):
            training.step()
        traced = len(place.kernels(work))
    recording.check(4)
    return plain, traced


@dataclass(frozen=True)
class Sums:
    """Device seconds of the raw sums of a tensor, and of `x.sum()`."""

    dtype: torch.dtype
    shape: tuple[int, int]
    ours: float
    torch: float

    @property
    def ratio(self) -> float:
        """How many times longer ours take."""
        return self.ours / self.torch


def sums(
    place: Place, dtype: torch.dtype, shape: tuple[int, int], *, most_bytes: int
) -> Sums | None:
    """Measures the kernels of the eight raw sums; None if the profiler sees no kernel.

    Several tensors in turn, so that neither finds one in a cache because of the one before, and
    none is recognised as one that has been read. What ends a step, one copy of the results, is
    among ours, divided by the number of tensors.
    """
    size = shape[0] * shape[1] * dtype.itemsize
    copies = max(2, min(_MOST_COPIES, most_bytes // size))
    tensors = [torch.randn(shape, device=place.name).to(dtype) for _ in range(copies)]
    reducer = Reducer(histogram_elements=None, sample_count=8)
    reduced_ = []

    def ours() -> None:
        for tensor in tensors:
            reducer.add(tensor, batch_dim=0)
        reduced_.append(reducer.finish())

    def plain() -> None:
        for tensor in tensors:
            _sum(tensor)

    seconds = {}
    for name, work in (("ours", ours), ("torch", plain)):
        for _ in range(3):
            work()
        events = [event for _ in range(3) for event in place.kernels(work)]
        seconds[name] = sum(map(place.kernel_seconds, events)) / (3 * copies)
    for each in reduced_:
        if each.wait is not None:
            each.wait()
    if not seconds["ours"] or not seconds["torch"]:
        return None
    return Sums(dtype, shape, seconds["ours"], seconds["torch"])


def _sum(tensor: Tensor) -> Tensor:
    return tensor.sum()
