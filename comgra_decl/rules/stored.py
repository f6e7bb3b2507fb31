"""What the rules found while a run was recorded, as they left it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comgra_decl.errors import SpecError
from comgra_decl.rules.catalogue import build
from comgra_decl.rules.diagnosis import Diagnosis, beside, steps_shown
from comgra_decl.rules.engine import Unchecked
from comgra_decl.rules.finding import Finding

if TYPE_CHECKING:
    from comgra_decl.query import Run


def stored(run: Run) -> Diagnosis | None:
    """Returns the findings of a run as they were stored, with chains and evidence, best first.

    Reads one small document and no record. None where no rule has looked at the run: `rules: off`,
    or no record yet.
    """
    document = run.document("findings")
    if document is None:
        return None
    unchecked = [Unchecked(rule, why) for rule, why in sorted(document["unchecked"].items())]
    checked = [name for name in _names(run) if name not in document["unchecked"]]
    findings = [Finding.from_json(content) for content in document["findings"]]
    return beside(run, Diagnosis(findings, unchecked, checked, len(steps_shown(run))))


def _names(run: Run) -> list[str]:
    """Returns the rules of the run's spec; none where one of them is no longer at hand."""
    try:
        return [rule.name for rule in build(run.spec.rules)]  # imports none of them
    except SpecError:
        return []
