"""Exclude the existing objects of a test process from garbage collection and searches."""

from __future__ import annotations

import gc

freeze, frozen = gc.freeze, gc.get_freeze_count
"""The original functions, which tests may replace."""


def set_aside() -> None:
    """Freeze all existing objects, for the speed of the suite; programs have frozen none."""
    gc.collect()
    freeze()
