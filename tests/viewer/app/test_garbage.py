"""The viewer's own process: what is imported is never searched, what is large is given back."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

_PROGRAM = """
    import gc
    import numpy as np
    from comgra_decl.viewer.garbage import settle

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def holes(size):  # every second array goes: what is left keeps a heap from shrinking
        held = [np.ones(size, np.uint8) for _ in range(400)]
        before = resident()
        del held[::2]
        return (before - resident()) / (200 * size)

    settle()
    settle()
    print(gc.get_freeze_count() > 10_000, gc.get_threshold()[2] >= 100, holes(100_000))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the memory in use")
def test_large_arrays_are_given_back_at_once() -> None:
    command = [sys.executable, "-c", textwrap.dedent(_PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    frozen, rarely, share = done.stdout.split()
    assert (frozen, rarely) == ("True", "True")
    assert float(share) > 0.8
