"""Where the nets are trained: on a CUDA device, or on the CPU instead.

All differences between the two are in this module.
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
    """A place to train.

    Attributes:
        name: the type of its torch device.
        half: the dtype of mixed precision.
    """

    name: str
    half = torch.bfloat16

    @property
    @abstractmethod
    def description(self) -> str:
        """Description of the device and its driver."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all queued work is done."""

    @abstractmethod
    def forbid_waiting(self) -> Any:
        """Return a context in which an operation that waits for the device raises an error."""

    @abstractmethod
    def peak(self, work: Callable[[], None]) -> int | None:
        """Return the peak of allocated bytes during `work`; None if unknown."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the free memory in bytes."""

    @abstractmethod
    def is_kernel(self, event: Any) -> bool:
        """Whether a profiler event is a kernel that ran here."""

    @abstractmethod
    def kernel_seconds(self, event: Any) -> float:
        """Return the seconds for which that kernel ran."""

    def kernels(self, work: Callable[[], None]) -> list[Any]:
        """Return the profiler events of the kernels that `work` launches."""
        self.finish()
        activities = [ProfilerActivity.CPU]
        if self.name == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiled:
            work()
            self.finish()
        return [event for event in profiled.events() or () if self.is_kernel(event)]

    def seconds(self, work: Callable[[], None]) -> float:
        """Return the seconds that `work` takes, with no queued work before and after."""
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
        """The device, its memory and the CUDA version."""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gib = properties.total_memory / 2**30
        return f"{properties.name}, {gib:.0f} GiB, CUDA {torch.version.cuda}"

    def finish(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    @contextmanager
    def forbid_waiting(self) -> Iterator[None]:
        """Make torch raise where an operation waits."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def peak(self, work: Callable[[], None]) -> int:
        """Return the peak of torch's allocator."""
        self.finish()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        work()
        self.finish()
        return torch.cuda.max_memory_allocated()

    def free_bytes(self) -> int:
        """Return the driver's figure plus the memory that torch's allocator caches."""
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + kept

    def is_kernel(self, event: Any) -> bool:
        """Whether it ran on the device and is neither a memory copy nor a memset."""
        on_device = str(getattr(event, "device_type", "")).endswith("CUDA")
        marked = getattr(
            event, "is_user_annotation", False
        )  # host ranges that the profiler repeats
        other = ("Memcpy", "Memset", "ProfilerStep", "Optimizer.")
        return on_device and not marked and not event.name.startswith(other)

    def kernel_seconds(self, event: Any) -> float:
        """Return the seconds for which it ran on the device."""
        return float(event.time_range.elapsed_us()) / 1e6


class Processor(Place):
    """The CPU instead of a device: every torch operation counts as a kernel."""

    name = "cpu"

    @property
    def description(self) -> str:
        """States that there is no device."""
        return "the CPU instead of a device"

    def finish(self) -> None:
        """Do nothing: operations are synchronous."""

    @contextmanager
    def forbid_waiting(self) -> Iterator[None]:
        """Allow everything: no operation waits."""
        yield

    def peak(self, work: Callable[[], None]) -> None:
        """Run `work` and return None: torch does not count CPU memory."""
        work()

    def free_bytes(self) -> int:
        """Return an amount that suffices only for the smallest sizes."""
        return 1 << 30

    def is_kernel(self, event: Any) -> bool:
        """Whether it is a torch operation."""
        return bool(event.name.startswith("aten::"))

    def kernel_seconds(self, event: Any) -> float:
        """Return the seconds for which it ran, excluding the operations that it called."""
        return float(event.self_cpu_time_total) / 1e6


def place_of(name: str) -> Place:
    """Return the place with that name.

    Raises:
        SystemExit: the device is not available.
    """
    if name == "cpu":
        return Processor()
    if not torch.cuda.is_available():
        raise SystemExit(
            f"--device cuda: torch {torch.__version__} finds no CUDA device here. Run it where "
            "`python -c 'import torch; print(torch.cuda.is_available())'` says True, or test the "
            "same code on the CPU: --device cpu --smoke"
        )
    return Cuda()
