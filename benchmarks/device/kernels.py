"""Count and time the kernels that a record launches on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.device.places import Place
from benchmarks.device.recording import RECORD, reduced
from benchmarks.device.timing import Deadline
from benchmarks.nets import Training
from comgra_decl.stats import Reducer

_MOST_COPIES = 8


def launched(place: Place, training: Training, deadline: Deadline) -> tuple[int, int]:
    """Return the numbers of kernels launched by a plain and by a recorded step.

    Raises:
        OutOfTimeError: the deadline is reached.
    """

    def work() -> None:
        training.step()

    training.reset()
    for _ in range(3):
        training.step()
    plain = len(place.kernels(work))
    deadline.check()
    training.reset()
    with reduced(RECORD, later=True) as recording:
        for _ in range(3):
            training.step()
        traced = len(place.kernels(work))
    recording.check(4)
    return plain, traced


@dataclass(frozen=True)
class Sums:
    """Device seconds that a tensor's raw sums take, and those that `x.sum()` takes."""

    dtype: torch.dtype
    shape: tuple[int, int]
    ours: float
    torch: float

    @property
    def ratio(self) -> float:
        """Time of the raw sums, as a multiple of `x.sum()`."""
        return self.ours / self.torch


def sums(
    place: Place, dtype: torch.dtype, shape: tuple[int, int], *, most_bytes: int
) -> Sums | None:
    """Measure the kernels of the eight raw sums; None if the profiler reports no kernel.

    Uses several tensors in turn, so that none is still in a cache or recognized as already read.
    The copy of the results at the end of a step is included, divided by the number of tensors.
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
