"""A failing disk: calls on files below a folder end with EIO in programs that a test starts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("failing_disk.c")


class FailingDisk:
    """A library to be preloaded into programs, with a switch for each call.

    Args:
        folder: contains the library and the switches.
        under: the folder whose files are on the failing disk.

    Attributes:
        calls: the folder of the switches.
        environment: environment variables for a program with such a disk.
    """

    def __init__(self, folder: Path, under: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None or not Path("/proc/self/fd").exists():
            pytest.skip("needs a C compiler and Linux")
        library, self.calls = folder / "failing_disk.so", folder / "calls"
        self.calls.mkdir(parents=True)
        command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            pytest.skip(f"the compiler builds no library here: {built.stderr[-300:]}")
        self.environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "FAILING_CALLS": str(self.calls),
            "FAILING_UNDER": str(under.resolve()),
        }

    def fail(self, call: str) -> None:
        """Makes calls fail from now on: "fsync", "write", "rename", "read" or "open"."""
        (self.calls / call).touch()

    def recover(self) -> None:
        """Stops making calls fail."""
        for switch in self.calls.iterdir():
            switch.unlink()
