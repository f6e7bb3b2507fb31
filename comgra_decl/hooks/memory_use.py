"""The memory of the process and of its devices, the limits that apply to it, and their use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

_STATM = Path("/proc/self/statm")
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
_UNLIMITED = 1 << 60


def host_bytes() -> int | None:
    """Return the memory that this process occupies (resident set size); None if unknown."""
    try:
        return int(_STATM.read_bytes().split()[1]) * page_size()
    except (OSError, ValueError, IndexError):
        return None


def page_size() -> int:
    """Return the size of a page of memory, in bytes."""
    import resource

    return resource.getpagesize()


def device_bytes() -> int | None:
    """Return the bytes that torch's tensors take up on all CUDA devices; None if none is in use."""
    return _on_devices("memory_allocated")


def reserved_bytes() -> int | None:
    """Return the bytes that torch has reserved on all CUDA devices; None if none is in use."""
    return _on_devices("memory_reserved")


def _on_devices(question: str) -> int | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        ask = getattr(torch.cuda, question)
        return sum(int(ask(device)) for device in range(torch.cuda.device_count()))
    except RuntimeError:  # the device has failed
        return None


def device_utilization() -> float | None:
    """Return the share of the last moments in which a kernel ran, as the driver reports it.

    The mean of the CUDA devices that hold tensors of this process. The share also contains kernels
    of other processes. None if no device is in use, or if the driver does not report it (NVIDIA's
    needs the package `nvidia-ml-py`).
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        devices = range(torch.cuda.device_count())
        used = [device for device in devices if torch.cuda.memory_allocated(device)]
        shares = [torch.cuda.utilization(device) / 100 for device in used]
    except Exception:  # the package is missing, or any error of the driver
        return None
    return sum(shares) / len(shares) if shares else None


def memory_facts() -> dict[str, Any]:
    """Return the memory in use and its limits, in bytes.

    `host`: for this process. `limit` and `used`: for its container or, without one, the machine.
        `device`, `device_reserved`, `device_total`: for the current CUDA device.
    """
    return {**memory_limit(), **_device()}


def memory_limit() -> dict[str, Any]:
    """Return the memory of this process and the limit that applies to it, in bytes."""
    return {"host": host_bytes(), **_limit()}


def _limit() -> dict[str, int]:
    for limit, used in _CGROUPS:
        try:
            most = limit.read_text().strip()
            if most.isdigit() and int(most) < _UNLIMITED:
                return {"limit": int(most), "used": int(used.read_text())}
        except (OSError, ValueError):
            continue
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return {"limit": sizes["MemTotal"], "used": sizes["MemTotal"] - sizes["MemAvailable"]}
    except (OSError, ValueError, KeyError, IndexError):
        return {}


def _device() -> dict[str, int]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    try:
        free, total = torch.cuda.mem_get_info()
        return {
            "device": torch.cuda.memory_allocated(),
            "device_reserved": torch.cuda.memory_reserved(),
            "device_total": total,
            "device_free": free,
        }
    except RuntimeError:  # the device has failed
        return {}
