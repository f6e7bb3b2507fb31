"""What is stored last of a run: documents that no record brings any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from comgra_decl.records import StepBatch

Last = Callable[[], list[StepBatch]]


def nothing(documents: dict[str, Any]) -> StepBatch:
    """Returns a batch without records, for documents alone."""
    empty = np.empty((0, 0, 0, 0), np.float32)
    batch = StepBatch([], np.empty(0, np.int32), empty, empty, None, None, [], [], [], [])
    batch.documents = documents
    return batch


def at_last(rules: Last | None, documents: Callable[[], dict[str, Any]]) -> Last:
    """Returns what gives, once, all that is stored when no more records come.

    Args:
        rules: gives what they have found at last; None: there are none.
        documents: gives those of the tracer that have changed after the last record.
    """

    def last() -> list[StepBatch]:
        found = rules() if rules is not None else []
        late = documents()
        return [*found, nothing(late)] if late else found

    return last
