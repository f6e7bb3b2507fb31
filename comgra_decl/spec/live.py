"""Which parts of a spec may change during recording."""

from __future__ import annotations

from comgra_decl.spec.model import Spec

LIVE_KEYS = ("nodes", "exclude", "schedule", "types", "graph")
"""Keys of the spec whose changes take effect at the next step. The other keys cannot change,
because data already on disk depends on them."""


def changed_keys(before: Spec, after: Spec) -> list[str]:
    """Return the top-level keys that differ."""
    return [k for k in Spec.model_fields if getattr(before, k) != getattr(after, k)]


def refusals(before: Spec, after: Spec) -> list[str]:
    """Return a sentence for each change that is not possible during a run."""
    fixed = [key for key in changed_keys(before, after) if key not in LIVE_KEYS]
    return [
        f"comgra.{key}: cannot change while a run is being recorded (only {', '.join(LIVE_KEYS)} "
        "can); start a new run to change it"
        for key in fixed
    ]
