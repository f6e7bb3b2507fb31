"""Why records were kept that the schedule alone would not have recorded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.store.layout import RecordColumn
from comgra_decl.store.view import View


def kept_reasons(view: View) -> NDArray[np.object_]:
    """Returns for each record why a trigger of `keep` made it be kept, None if none did."""
    reasons: NDArray[np.object_] = np.full(view.n, None, object)
    steps = view.records[:, RecordColumn.STEP]
    for first, last in (view.document("keep") or {}).get("steps", ()):
        # only there are the facts of single records worth reading
        for record in np.flatnonzero((steps >= first) & (steps <= last)).tolist():
            kept = view.extra(record).get("kept")
            reasons[record] = ", ".join(kept) if kept else None
    return reasons
