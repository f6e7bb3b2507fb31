"""Pictures of how similar the representations of the same samples are."""

from __future__ import annotations

from comgra_decl.pictures import likeness

from .picture import Picture
from .recorded_values import RecordedValues


def layers_alike(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return the CKA of all layers at a step; see `Run.picture`."""
    del node  # all of them
    at = read.step(step, read.type)
    values = read.all_values(at)
    matrix = likeness.cka_matrix([*values.values()])
    names = [*values]
    labels = {"node": names, "other node": names}
    facts = {"samples": [len(value) for value in values.values()]}
    return Picture("likeness", matrix, ("node", "other node"), None, at, labels, facts)


def steps_alike(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return the CKA of a layer at all steps; see `Run.picture`."""
    del step  # all of them
    wanted = read.wanted("likeness_over_steps", node)
    values = read.over_steps(read.slot(wanted), read.steps(), wanted)
    matrix = likeness.cka_matrix([*values.values()])
    labels = {"step": [*values], "other step": [*values]}
    axes = ("step", "other step")
    facts = {"samples": [len(value) for value in values.values()]}
    return Picture("likeness_over_steps", matrix, axes, wanted, None, labels, facts)
