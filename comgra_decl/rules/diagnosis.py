"""Runs the rules on a stored run, and reads stored findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import SpecError
from comgra_decl.records import (
    ENDED,
    INTERVENTION_CHECKS,
    PERTURBATIONS,
    PICTURE_CHECKS,
    PROFILE,
    SKIPPED_STEP,
)
from comgra_decl.rules.base import Rule
from comgra_decl.rules.catalogue import build
from comgra_decl.rules.engine import Engine, Unchecked
from comgra_decl.rules.finding import Finding
from comgra_decl.rules.readings import Reading
from comgra_decl.rules.window import Numbers, Window
from comgra_decl.spec.stats import DERIVED

if TYPE_CHECKING:
    import pandas as pd

    from comgra_decl.query import NotedCheck, Run
    from comgra_decl.query.chunks import Chunk
    from comgra_decl.spec.rules import Rules


@dataclass(frozen=True)
class Diagnosis:
    """Result of running the rules on a run.

    Attributes:
        findings: most important first.
        unchecked: rules that could not check the run, with the reasons.
        checked: names of the rules that checked the run.
        records: number of training records that were checked.
        experiments: stored results of experiments with the run's script.
        unreadable: the reason why a stored result cannot be read, by name of the experiment.
        damage: the damaged data that could not be checked.
        incomplete: whether any of this is data that the rules check.
        readings: the run's values for the checklist questions, by name.
        caveats: possible problems with the losses that no rule can detect, one sentence each.
    """

    findings: list[Finding]
    unchecked: list[Unchecked]
    checked: list[str]
    records: int
    experiments: tuple[NotedCheck, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    damage: tuple[str, ...] = ()
    incomplete: bool = False
    readings: Mapping[str, Reading] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()


def diagnose(run: Run, rules: Rules | None = None, *, trust: bool = False) -> Diagnosis:
    """Run the rules on a stored run and return their findings.

    Each rank of a distributed run is checked separately, as during recording.

    Args:
        run: as of its last `refresh`.
        rules: the rules to run, as in the spec; None for those of the run's own spec, or the
            default if it has none.
        trust: whether to import and run rule classes named in the run's own spec, which may come
            from an untrusted source. Without it, such rules are unchecked. Classes named by `rules`
            always run.

    Raises:
        SpecError: `rules` is invalid.
    """
    if len(run.ranks) > 1:
        return _joined([diagnose(run.rank(n), rules, trust=trust) for n in run.ranks], run)
    return concluded(examined(run, rules, trust=trust), run)


def _joined(diagnoses: list[Diagnosis], run: Run) -> Diagnosis:
    """Return the findings of all ranks of a run, joined in the same way as stored findings."""
    from comgra_decl.query.ranks.facts import join_findings

    documents = [{"findings": [f.to_json() for f in d.findings]} for d in diagnoses]
    joined = join_findings(documents, run.ranks)
    assert joined is not None  # every rank stores the document
    findings = [Finding.from_json(content) for content in joined["findings"]]
    damage = dict.fromkeys(run.damage)  # each rank was read separately and has its own damage
    for rank, diagnosis in zip(run.ranks, diagnoses, strict=True):
        known = (loss for loss in diagnosis.damage if loss not in damage)
        damage |= dict.fromkeys([f"rank {rank}: {loss}" for loss in known])
    return replace(
        diagnoses[0],
        findings=findings,
        records=len(steps_shown(run)),
        damage=tuple(damage),
        incomplete=any(diagnosis.incomplete for diagnosis in diagnoses),
    )


def concluded(engine: Engine, run: Run) -> Diagnosis:
    """Return the diagnosis of an engine that has received an entire run."""
    unchecked = engine.unchecked()
    could_not = {entry.rule for entry in unchecked}
    names = [name for name in engine.names if not name.startswith("_")]  # not rules
    checked = [name for name in names if name not in could_not]
    diagnosis = Diagnosis(
        engine.findings(),
        unchecked,
        checked,
        engine.scene.records,
        readings=engine.readings(),
        caveats=tuple(engine.caveats()),
    )
    return beside(run, diagnosis)


def beside(run: Run, diagnosis: Diagnosis) -> Diagnosis:
    """Add results that do not come from rules: stored experiments and damage."""
    noted, damage = run.noted(), tuple(run.damage)
    return replace(
        diagnosis,
        experiments=noted.verdicts,
        unreadable=noted.damaged,
        damage=damage,
        incomplete=not set(damage) <= {*noted.damage},
    )


def examined(
    run: Run,
    rules: Rules | None = None,
    *,
    trust: bool = False,
    prepare: Callable[[list[Rule]], None] | None = None,
) -> Engine:
    """Return an engine that has received an entire stored run.

    Args:
        run: as of its last `refresh`.
        rules: the rules to run; None for those of the run's own spec, or the default.
        trust: see `diagnose`.
        prepare: may change the list of rules before they receive data.
    """
    statistics = tuple(name for name in run.statistics if name not in DERIVED)
    if rules is None:
        declared = run.spec.rules
        built = build(declared if declared != "off" else "default", trust=trust)
    else:
        built = build(rules, trust=True)
    if prepare is not None:
        prepare(built)
    engine = Engine(built, statistics)
    engine.add_document("modules", run.modules)
    engine.add_document("report", run.report)
    for name in (PERTURBATIONS, PICTURE_CHECKS, INTERVENTION_CHECKS, PROFILE):
        if (content := run.document(name)) is not None:
            engine.add_document(name, content)
    feed(engine, run)
    if run.state in ENDED:
        engine.end()
    return engine


def feed(engine: Engine, run: Run, *, until: int | None = None) -> None:
    """Pass all records and metrics of a stored run to an engine.

    Args:
        engine: receives them.
        run: as of its last `refresh`.
        until: the step at which another program resumes the run. That step and all later steps are
            omitted, because they are recorded again. None includes all steps.
    """
    known: set[str] = set()
    unseen, kpis = _unseen(run), run.metrics_as_stored()
    if until is not None:
        kpis = kpis[kpis["step"] < until]
    skipped = np.unique(kpis["step"][kpis["name"] == SKIPPED_STEP].to_numpy(np.int64))
    for chunk in run.chunks(probes=False):
        engine.add_slots(chunk.slots[len(engine.scene.table) :])
        for digest in {digest for digest in chunk.structures if digest} - known:
            known.add(digest)
            if (graph := chunk.structure(digest)) is not None:
                engine.add_structure(graph)
        window = _window(chunk, engine, skipped)
        shown = ~(window.train & _within(window.steps, unseen))
        if until is not None:  # earlier evaluations still count
            shown &= window.steps < until + ~window.train
        rows = np.flatnonzero(shown)
        if len(rows):
            engine.look(window.only(rows, window.first))
    for numbers in _numbers(kpis):
        engine.look_at_numbers(numbers)


def steps_shown(run: Run) -> NDArray[np.int64]:
    """Return the steps of the training records that the rules check."""
    steps = run.steps
    return steps[~_within(steps, _unseen(run))]


def _unseen(run: Run) -> NDArray[np.int64]:
    """Return the first and last steps, of shape [k, 2], of spans kept only because of findings.

    Rules did not receive these spans during recording, because they were kept too late.
    """
    spans = (run.document("keep") or {}).get("unseen", [])
    return np.array(spans, np.int64).reshape(-1, 2)


def _within(steps: NDArray[np.int64], spans: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask of the steps that lie in any of several sorted, disjoint spans."""
    at = np.searchsorted(spans[:, 0], steps, "right") - 1
    there: NDArray[np.bool_] = at >= 0
    there[there] = steps[there] <= spans[at[there], 1]
    return there


def _window(chunk: Chunk, engine: Engine, skipped: NDArray[np.int64]) -> Window:
    return Window(
        table=engine.scene.table,
        statistics=engine.scene.statistics,
        first=int(chunk.records[0]),
        steps=chunk.steps,
        types=chunk.types,
        train=chunk.train,
        aggregates=chunk.aggregates,
        details=chunk,
        structures=chunk.structures,
        histograms=chunk.has_histograms,
        skipped=chunk.train & np.isin(chunk.steps, skipped),
        shape_codes=chunk.shape_codes,
        shapes=chunk.shapes,
        facts=chunk.facts,
    )


def _numbers(table: pd.DataFrame) -> Iterator[Numbers]:
    for (name, type_), part in table.groupby(["name", "type"], sort=False):
        steps = part["step"].to_numpy(np.int64)
        yield Numbers(str(name), str(type_), steps, part["value"].to_numpy(np.float64))


def stored(run: Run) -> Diagnosis | None:
    """Return the findings stored with a run, with chains and evidence, most important first.

    Reads one small document and no records. Returns None if no rule has checked the run, because of
    `rules: off` or because there are no records yet.
    """
    document = run.document("findings")
    if document is None:
        return None
    unchecked = [Unchecked(rule, why) for rule, why in sorted(document["unchecked"].items())]
    checked = [name for name in _names(run) if name not in document["unchecked"]]
    findings = [Finding.from_json(content) for content in document["findings"]]
    readings = {
        name: Reading.from_json(content) for name, content in document.get("readings", {}).items()
    }
    diagnosis = Diagnosis(
        findings,
        unchecked,
        checked,
        len(steps_shown(run)),
        readings=readings,
        caveats=tuple(document.get("caveats", ())),
    )
    return beside(run, diagnosis)


def _names(run: Run) -> list[str]:
    """Return the names of the rules in the run's spec; empty if any of them no longer exists."""
    try:
        return [rule.name for rule in build(run.spec.rules)]  # imports no classes
    except SpecError:
        return []
