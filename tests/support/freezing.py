"""Exclude the existing objects of a test process from garbage collection and searches."""

from __future__ import annotations

import gc

freeze, frozen = gc.freeze, gc.get_freeze_count
"""The original functions, which tests may replace."""


def set_aside() -> None:
    """Freeze all existing objects, for the speed of the suite; programs have frozen none."""
    gc.collect()
    freeze()


def hide() -> None:
    """Let a program see frozen objects only once it has frozen some itself."""

    def freeze_more() -> None:
        gc.get_freeze_count = frozen
        freeze()

    gc.get_freeze_count, gc.freeze = (lambda: 0), freeze_more
