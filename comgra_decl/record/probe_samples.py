"""The samples that probes have stored in a run, so that a resumed run goes on with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from comgra_decl.errors import DamagedRunError
from comgra_decl.hooks.probing.samples import KeptSamples
from comgra_decl.query.checkpoints import as_tensor
from comgra_decl.records import PROBE_SAMPLES
from comgra_decl.spec.probes import probe_type
from comgra_decl.store.layout import RecordColumn

if TYPE_CHECKING:
    from comgra_decl.spec import Spec
    from comgra_decl.store.view import View

_UNREADABLE = "the run does not contain them in a readable form"


def kept_samples(spec: Spec, view: View) -> dict[str, KeptSamples | str]:
    """Return the samples of each probe that took them from the first batch of a run.

    Args:
        spec: the spec of the session that resumes the run.
        view: the run.

    Returns:
        By probe, for those that have records: the samples, or the reason why there are none.
    """
    found: dict[str, KeptSamples | str] = {}
    for name, probe in spec.probes.items():
        records = [] if probe.batch is not None else [*_records(view, probe_type(name))]
        if not records:
            continue
        try:
            kept = next(filter(None, (_kept(view, record) for record in records)), None)
        except (DamagedRunError, TypeError, ValueError, KeyError) as error:  # runs are not trusted
            found[name] = f"{_UNREADABLE} ({type(error).__name__}: {error})"
            continue
        found[name] = _UNREADABLE if kept is None else kept
        declared = probe.samples.model_dump(mode="json")
        if kept is not None and kept.declared != declared:
            found[name] = (
                f"the spec asked for {_shown(kept.declared)} and now for {_shown(declared)}"
            )
    return found


def _records(view: View, type_: str) -> Iterator[int]:
    """Yield the records of a type, the newest first."""
    types = view.names("type")
    if type_ in types:
        chosen = view.records[:, RecordColumn.TYPE] == types.index(type_)
        yield from reversed(np.flatnonzero(chosen & ~view.superseded).tolist())


def _kept(view: View, record: int) -> KeptSamples | None:
    extra = view.extra(record)
    facts = extra.get(PROBE_SAMPLES)
    if facts is None:
        return None
    tensors = {}
    for slot in view.slots:
        if slot.kind != "input" or slot.key.pass_ != "forward" or slot.key.node != "input":
            continue
        value = view.value(record, slot.id)
        if value is not None:
            tensors[slot.key.role] = as_tensor(value if slot.batch_dim is not None else value[0])
    classes = facts["classes"]
    return KeptSamples(
        tensors,
        places=[int(place) for place in view.samples(record)],
        labels=[str(label) for label in extra.get("labels", [])],
        classes=None if classes is None else [int(each) for each in classes],
        declared=dict(facts["declared"]),
    )


def _shown(declared: dict[str, object]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in declared.items())
