"""The viewer process: the collector never scans what was imported; free memory is released."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

_PROGRAM = """
    import gc
    import numpy as np
    from comgra_decl.viewer import memory as garbage

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    garbage._BETWEEN = 0
    garbage.settle()
    garbage.settle()
    held = [np.ones(100_000, np.uint8) for _ in range(400)]
    before = resident()
    del held[::2]  # what is left keeps the heap from shrinking
    garbage.sweep()
    share = (before - resident()) / (200 * 100_000)
    print(gc.get_freeze_count() > 10_000, gc.get_threshold()[2] >= 100, share)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the memory in use")
def test_a_sweep_gives_back_what_lies_between() -> None:
    command = [sys.executable, "-c", textwrap.dedent(_PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    frozen, rarely, share = done.stdout.split()
    assert (frozen, rarely) == ("True", "True")
    assert float(share) > 0.8
