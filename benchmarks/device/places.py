"""Where the nets are trained: a CUDA device, or the processor in its place.

Everything that the two do differently is here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


class Place(ABC):
    """A place to train in.

    Attributes:
        name: the type of its torch device.
        half: the dtype of mixed precision.
    """

    name: str
    half = torch.bfloat16

    @property
    @abstractmethod
    def description(self) -> str:
        """The device, and what drives it, in words."""

    @abstractmethod
    def finish(self) -> None:
        """Waits until all that was asked for is done."""

    @abstractmethod
    def forbid_waiting(self) -> Any:
        """Returns a context within which an operation that waits for the device is an error."""

    @abstractmethod
    def peak(self, work: Callable[[], None]) -> int | None:
        """Returns the peak of allocated bytes during `work`; None if unknown."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Returns how much memory is left."""

    @abstractmethod
    def is_kernel(self, event: Any) -> bool:
        """Whether an event of the profiler is a kernel that ran here."""

    @abstractmethod
    def kernel_seconds(self, event: Any) -> float:
        """Returns how long that kernel ran."""

    def kernels(self, work: Callable[[], None]) -> list[Any]:
        """Returns the profiler's events of the kernels that `work` launches."""
        self.finish()
        activities = [ProfilerActivity.CPU]
        if self.name == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiled:
            work()
            self.finish()
        return [event for event in profiled.events() or () if self.is_kernel(event)]

    def seconds(self, work: Callable[[], None]) -> float:
        """Returns the time of `work`, from nothing under way until all of it is done."""
        self.finish()
        began = time.perf_counter()
        work()
        self.finish()
        return time.perf_counter() - began


class Cuda(Place):
    """The current CUDA device."""

    name = "cuda"

    @property
    def description(self) -> str:
        """The device, its memory and the version of CUDA."""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gib = properties.total_memory / 2**30
        return f"{properties.name}, {gib:.0f} GiB, CUDA {torch.version.cuda}"

    def finish(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize()

    @contextmanager
    def forbid_waiting(self) -> Iterator[None]:
        """Makes torch raise where an operation waits."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def peak(self, work: Callable[[], None]) -> int:
        """Returns the peak of torch's allocator."""
        self.finish()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        work()
        self.finish()
        return torch.cuda.max_memory_allocated()

    def free_bytes(self) -> int:
        """Returns the driver's figure, including memory that torch's allocator caches."""
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + kept

    def is_kernel(self, event: Any) -> bool:
        """Whether it ran on the device and is no copy and no filling of memory."""
        on_device = str(getattr(event, "device_type", "")).endswith("CUDA")
        marked = getattr(event, "is_user_annotation", False)  # spans of the host, shown again
        other = ("Memcpy", "Memset", "ProfilerStep", "Optimizer.")
        return on_device and not marked and not event.name.startswith(other)

    def kernel_seconds(self, event: Any) -> float:
        """Returns how long it ran on the device."""
        return float(event.time_range.elapsed_us()) / 1e6


class Processor(Place):
    """The processor, in the place of a device: every operation of torch counts as a kernel."""

    name = "cpu"

    @property
    def description(self) -> str:
        """That there is no device."""
        return "the processor in the place of a device"

    def finish(self) -> None:
        """Nothing is ever under way."""

    @contextmanager
    def forbid_waiting(self) -> Iterator[None]:
        """Forbids nothing, as nothing waits."""
        yield

    def peak(self, work: Callable[[], None]) -> None:
        """Does the work; torch does not count the processor's memory."""
        work()

    def free_bytes(self) -> int:
        """Returns enough for the smallest sizes only."""
        return 1 << 30

    def is_kernel(self, event: Any) -> bool:
        """Whether it is an operation of torch."""
        return bool(event.name.startswith("aten::"))

    def kernel_seconds(self, event: Any) -> float:
        """Returns how long it ran, without the operations that it called."""
        return float(event.self_cpu_time_total) / 1e6


def place_of(name: str) -> Place:
    """Returns the place with that name.

    Raises:
        SystemExit: there is no such device here.
    """
    if name == "cpu":
        return Processor()
    if not torch.cuda.is_available():
        raise SystemExit(
            f"--device cuda: torch {torch.__version__} finds no CUDA device here. Run it where "
            "`python -c 'import torch; print(torch.cuda.is_available())'` says True, or try the "
            "same code on the processor: --device cpu --smoke"
        )
    return Cuda()
