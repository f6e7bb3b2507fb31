"""What a person should read of a run's report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def remarks(report: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns each sentence about what was declared and is not recorded, and each warning, once.

    Args:
        report: the document `report` of a run; empty before the first record.
    """
    refused = [
        f"{name} is not recorded: {why}" for name, why in (report.get("refused") or {}).items()
    ]
    said = [*(report.get("unmatched") or ()), *refused, *(report.get("warnings") or ())]
    return tuple(dict.fromkeys(map(str, said)))
