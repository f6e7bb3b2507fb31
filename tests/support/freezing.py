"""What a test process holds already, kept out of what tests and the collector look through."""

from __future__ import annotations

import gc

freeze, frozen = gc.freeze, gc.get_freeze_count
"""As they are while no test stands in their place."""


def set_aside() -> None:
    """Freezes all that there is, for the suite's own sake: no program has frozen anything."""
    gc.collect()
    freeze()
