"""The memory of the process and of its devices, the limits that apply to it, and their use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

_STATM = Path("/proc/self/statm")
_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_FILES = {
    "": (".", "memory.max", "memory.current"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""By the controllers of a line in `_GROUPS` (control groups of version 2 or 1): the folder below
`_MOUNT`, and the files with the limit and the use."""

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
    """Return the limit of the control groups that leaves the least room, or that of the machine.

    A batch system may limit any group around that of the process.
    """
    found = [each for folder, *files in _own_groups() if (each := _read(folder, *files))]
    if found:
        return min(found, key=lambda each: each["limit"] - each["used"])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return {"limit": sizes["MemTotal"], "used": sizes["MemTotal"] - sizes["MemAvailable"]}
    except (OSError, ValueError, KeyError, IndexError):
        return {}


def _own_groups() -> Iterator[tuple[Path, str, str]]:
    """Yield the folders of the groups that contain this process, and the names of their files."""
    try:
        lines = _GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in _FILES.keys() & {*controllers.split(",")}:
            base, *files = _FILES[controller]
            parts = PurePosixPath(path).parts[1:]
            for depth in range(len(parts) + 1):  # in a container, only the outermost may be there
                yield _MOUNT.joinpath(base, *parts[:depth]), files[0], files[1]


def _read(folder: Path, limit: str, used: str) -> dict[str, int] | None:
    try:
        most = (folder / limit).read_text().strip()
        if most.isdigit() and int(most) < _UNLIMITED:
            return {"limit": int(most), "used": int((folder / used).read_text())}
    except (OSError, ValueError):
        pass
    return None


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
