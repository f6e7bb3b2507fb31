"""Base classes for rules, and the declarations of their options and state.

Each rule is a class in its own file; see `docs/findings.md`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from comgra_decl.records import LOSS_CALLS, Severity, SlotInfo, Structure
from comgra_decl.rules.calls import LossCall, loss_calls
from comgra_decl.rules.curve import Curve
from comgra_decl.rules.finding import MOST_OTHERS, Finding, Place
from comgra_decl.rules.memory import NO_SLOTS, Bools, ClassCounts, Slots, Streak
from comgra_decl.rules.phases import Phases
from comgra_decl.rules.rows import NextTokens
from comgra_decl.rules.settings import Clipping, LearningRates
from comgra_decl.rules.table import Mask, SlotTable
from comgra_decl.rules.window import Numbers, Window
from comgra_decl.spec.base import Int, Number, SpecModel

T = TypeVar("T")

Count = Annotated[Int, Field(ge=1)]
"""An integer of 1 or more."""

Positive = Annotated[Number, Field(gt=0)]
"""A number above 0."""

Share = Annotated[Number, Field(gt=0, le=1)]
"""A number above 0 and at most 1."""

Fraction = Annotated[Number, Field(gt=0, lt=1)]
"""A number above 0 and below 1."""

Factor = Annotated[Number, Field(gt=1)]
"""A number above 1."""

_LEAST_LOSSES = 20  # required to determine whether the model learns

Measured = tuple[Bools, NDArray[Any]]
"""Where a condition is met, and the evidence for it; both of shape [records, slots]."""


class RuleParameters(SpecModel):
    """Options of a rule, as set in the spec; their defaults are declared only here."""

    severity: Severity | None = None
    """`error`, `warning` or `hint`; null for the rule's own severity."""


class Patient(RuleParameters):
    """Options of a rule whose condition must hold for several consecutive records."""

    patience: Count = 5
    """Number of consecutive records that must meet the condition."""


@dataclass(frozen=True)
class _PerRun:
    """A declared initial value, which `Rule.reset` replaces with the result of `make`."""

    make: Callable[[], Any]


def per_run(make: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Declare an attribute of a rule that is recreated for every run.

    Example: `early = per_run(Early, 5)`. Required for values that a rule changes in place
    (memories, dicts, lists). A value that is only ever reassigned can be a plain class attribute.

    Args:
        make: creates the initial value.
        arguments: passed to `make`.
        options: passed to `make`.

    Returns:
        A declaration that `Rule.reset` turns into an attribute; typed as that attribute.
    """
    declared: Any = _PerRun(partial(make, *arguments, **options))
    found: T = declared
    return found


@dataclass(slots=True)
class Seen:
    """The training records that contain something: first step, last step and number."""

    first: int
    last: int
    records: int = 0


@dataclass
class Scene:
    """Facts about a run in addition to its records.

    Attributes:
        table: the slots of the run.
        statistics: names of the recorded statistics.
        structures: the dependency graphs of all records so far, by hash.
        reshaped: by the same hash, the slots whose shape in the first record with that graph
            differs from the slot table.
        structure: the dependency graph of the newest record that has one.
        documents: the run's documents "modules", "report", "picture_checks" and
            "intervention_checks" and, at the end, "perturbations".
        calls: the distinct calls that compare a prediction with a target (at most 256). For each
            call, the steps of the first and last training record that contain it, and the number of
            such records.
        optimizers: the optimizers whose step is in the newest training record (see
            `records.OPTIMIZERS`).
        maximizes: whether any record contains a parameter group that is told to maximize.
        rates: the learning rates of these optimizers in all training records so far.
        clipping: whether the gradients that these optimizers use are clipped.
        phases: when the data and the learning rate changed.
        batch_softmaxes: shapes [batch, ...] of the tensors to which a softmax over the batch was
            applied.
        attentions: the attention calls of the first records (see `records.ATTENTIONS`).
        telling: calls in the first records whose arguments may reveal a mistake (see
            `records.TELLING`).
        objectives: for each of the first records, the structure of its losses (see
            `records.OBJECTIVES`).
        curves: the `loss` metric over the whole run, by type of execution.
        classes: the classes among the targets; see `count_classes`.
        next_tokens: whether targets are the next tokens of the input; see `compare_tokens`.
        records: number of training records so far.
        evaluations: number of evaluation records so far.
        last_step: step of the newest record or metric value; -1 before the first.
        has_histograms: whether records contain histograms.
        ended: whether the run has ended, so that no more records follow.
    """

    table: SlotTable = field(default_factory=SlotTable)
    statistics: tuple[str, ...] = ()
    structures: dict[str, Structure] = field(default_factory=dict)
    reshaped: dict[str, dict[int, SlotInfo]] = field(default_factory=dict)
    structure: Structure | None = None
    documents: dict[str, Any] = field(default_factory=dict)
    calls: dict[LossCall, Seen] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    maximizes: bool = False
    rates: LearningRates = field(default_factory=LearningRates)
    clipping: Clipping = field(default_factory=Clipping)
    phases: Phases = field(default_factory=Phases)
    batch_softmaxes: list[tuple[int, ...]] = field(default_factory=list)
    attentions: list[dict[str, Any]] = field(default_factory=list)
    telling: list[dict[str, Any]] = field(default_factory=list)
    objectives: list[list[dict[str, Any]]] = field(default_factory=list)
    curves: dict[str, Curve] = field(default_factory=dict)
    classes: ClassCounts = field(default_factory=ClassCounts)
    next_tokens: NextTokens = field(default_factory=NextTokens)
    records: int = 0
    evaluations: int = 0
    last_step: int = -1
    has_histograms: bool = False
    ended: bool = False
    _raw_calls: object = None
    _latest_calls: list[LossCall] = field(default_factory=list)
    _counted: int = 0  # number of training records in `classes`
    _compared: int = 0  # number of training records in `next_tokens`

    def told(self, kind: str) -> list[dict[str, Any]]:
        """Return the facts of one kind among those in `telling`, in the order of the calls."""
        return [fact for fact in self.telling if fact.get("kind") == kind]

    def terms(self, kind: str) -> list[dict[str, Any]]:
        """Return the terms of one kind in the losses of the first records.

        See `hooks.tensors.terms`. Each has the number of its "record" and of its "loss" in it.
        """
        return [
            {**term, "record": record, "loss": number}
            for record, losses in enumerate(self.objectives)
            for number, loss in enumerate(losses)
            for term in loss.get("terms") or ()
            if term.get("kind") == kind
        ]

    def calls_of(self, facts: Mapping[str, Any]) -> list[LossCall]:
        """Return the loss calls of a record; the same list as before if they are the same."""
        raw = facts.get(LOSS_CALLS)
        if raw != self._raw_calls:  # nearly all records have the same calls
            self._raw_calls, self._latest_calls = raw, [*loss_calls(facts)]
        return self._latest_calls

    def count_classes(self, window: Window) -> None:
        """Add the next training records to `classes`, unless another rule has added them."""
        if window.first >= self._counted:
            self.classes.look(window)
            self._counted = window.first + len(window)

    def compare_tokens(self, window: Window) -> None:
        """Add the next training records to `next_tokens`, unless another rule has added them."""
        if window.first >= self._compared:
            self.next_tokens.look(window)
            self._compared = window.first + len(window)

    @property
    def learns(self) -> bool:
        """Whether the loss has fallen by half and is still near its minimum.

        Compares the mean of the last tenth of the losses with those of the other tenths, for the
        type of execution with the most losses. In such a run, unusual values do no harm.
        """
        means = self._tenths()
        return bool(means) and 0 <= means[-1] <= min(0.5 * means[0], 1.5 * min(means))

    @property
    def falls(self) -> bool:
        """Whether at least nine tenths of the largest fall of the loss since the start remain."""
        means = self._tenths()
        return bool(means) and means[0] - means[-1] >= 0.9 * (means[0] - min(means)) > 0

    def _tenths(self) -> list[float]:
        """Return the mean loss in each tenth of the run; empty if there are too few losses."""
        curve = max(self.curves.values(), key=lambda its: its.count, default=None)
        if curve is None or curve.count < _LEAST_LOSSES:
            return []
        return [curve.mean(i / 10, (i + 1) / 10)[0] for i in range(10)]

    @property
    def bootstraps(self) -> bool:
        """Whether the loss depends on the models' own outputs, as in reinforcement learning.

        True if a function other than a loss combines probabilities with integers (the actions), or
        if the loss depends on outputs of models without gradients, so that targets change with the
        model, as in temporal differences.
        """
        return any(call.chooses for call in self.calls) or any(
            not gradient and graph.kinds[a] == "computed" and graph.kinds[b] == "loss"
            for graph in self.structures.values()
            for a, b, gradient in graph.edges
        )

    @property
    def are_cleared(self) -> bool:
        """Whether no gradients were left from the step before when a backward pass began."""
        return any(loss.get("uncleared") == 0 for losses in self.objectives for loss in losses)

    @property
    def supervised(self) -> bool:
        """Whether a loss measures the distance of predictions from targets independent of them."""
        return any(call.measures_distance for call in self.calls) and not self.bootstraps

    @property
    def parameters(self) -> dict[tuple[str, str], Mapping[str, Any]]:
        """Facts about each parameter (`trainable`, `shape`, ...), by node and role."""
        found = {}
        for module in self.documents.get("modules") or []:
            for name, facts in module["parameters"].items():
                found[module["node"], name] = facts
        return found


def trained_models(scene: Scene) -> list[str]:
    """Return the nodes of the models whose parameters an optimizer updates."""
    found: list[str] = []
    model = ""
    for module in scene.documents.get("modules") or []:
        model = str(module["node"]) if not module["path"] else model
        held = any(facts.get("optimized", True) for facts in module["parameters"].values())
        if held and model not in found:
            found.append(model)
    return found


class Rule(ABC):
    """Checks a run and reports problems.

    Each instance checks one run, live or stored. Its findings must not depend on how records are
    divided into windows, so that a live run and a stored run give the same findings.
    """

    name: ClassVar[str]
    """Name of the rule in the spec, in findings and in the documentation."""

    severity: ClassVar[Severity] = "warning"
    """Severity of the findings."""

    certainty: ClassVar[float] = 0.5
    """Probability that a finding is correct, from 0 to 1; orders findings of the same severity."""

    definition: ClassVar[str]
    """Exact condition that the rule checks."""

    source: ClassVar[str]
    """Source of the definition and the defaults."""

    advice: ClassVar[str]
    """Advice about the problem."""

    explained_by: ClassVar[tuple[str, ...]] = ()
    """Rules whose findings explain this rule's findings."""

    explained_by_earlier: ClassVar[tuple[str, ...]] = ()
    """Rules whose findings explain this rule's findings if they began no later than these."""

    hints_explain: ClassVar[bool] = True
    """Whether this rule's findings also explain others if they are only hints. False if a hint
    means that the problem does no harm.
    """

    minimizes: ClassVar[bool] = False
    """Whether the rule is about the sign of a loss, which it takes for one that is minimized. The
    rule then checks no run in which an optimizer maximizes (`maximize=True`)."""

    Parameters: ClassVar[type[RuleParameters]] = RuleParameters
    """Options with their defaults."""

    def __init__(self, parameters: RuleParameters | None = None) -> None:
        self.parameters: Any = self.Parameters() if parameters is None else parameters
        self.scene = Scene()
        """Facts about the run so far; set by the engine."""
        self.reset()

    def reset(self) -> None:
        """Reset every attribute declared in the class to its initial value."""
        declared = {k: v for kind in reversed(type(self).__mro__) for k, v in vars(kind).items()}
        for name in declared.keys() & vars(self).keys():
            delattr(self, name)  # reveals the initial value of the class
        for name, start in declared.items():
            if isinstance(start, _PerRun):
                setattr(self, name, start.make())

    def look(self, window: Window) -> None:  # noqa: B027 (most rules override one of these)
        """Process the next training records."""

    def look_at_evaluation(self, window: Window) -> None:  # noqa: B027
        """Process the next evaluation records."""

    def look_at_skipped(self, window: Window) -> None:  # noqa: B027
        """Process the next records, including the gradients discarded by mixed precision.

        `look` receives the same records without these gradients.
        """

    def look_at_numbers(self, numbers: Numbers) -> None:  # noqa: B027
        """Process the next values of one metric for one type of execution."""

    @abstractmethod
    def findings(self, scene: Scene) -> list[Finding]:
        """Return the findings so far."""

    @abstractmethod
    def missing(self, scene: Scene) -> str | None:
        """Return the reason and the requirement if the run could not be checked, or None."""

    def advise(self, scene: Scene) -> str:
        """Return advice for this run, leaving out what the program already does."""
        return self.advice

    def narrowed(self, finding: Finding) -> Finding:
        """Return a finding of this rule, narrowing the interval in which it began if possible.

        For example, metrics logged at every step can narrow the interval. Called once the chain of
        causes is known.
        """
        return finding

    def follows(self, finding: Finding, other: Finding) -> bool:
        """Return whether another rule's finding explains a finding of this rule."""
        if other.rule in self.explained_by:
            return True
        begins = other.first_step if other.after_step is None else other.after_step + 1
        return other.rule in self.explained_by_earlier and begins <= finding.first_step

    def marks(self) -> dict[int, int]:
        """Return the slots with a finding of this rule, and the first step of each."""
        return {}

    def finding(self, scene: Scene, **facts: Any) -> Finding:
        """Return a finding of this rule; `facts` overrides the attributes of the class."""
        severity = self.parameters.severity or facts.pop("severity", self.severity)
        facts.pop("severity", None)
        if "advice" not in facts:
            facts["advice"] = self.advise(scene)
        facts.setdefault("certainty", self.certainty)
        facts.setdefault("last_step", scene.last_step)
        return Finding(rule=self.name, severity=severity, **facts)


class FactRule(Rule):
    """A rule about facts of one kind in the first records, of which it reports the first.

    A subclass declares the kind and the message about a fact (`sentence`). It may select the facts
    to report (`chosen`).
    """

    kind: ClassVar[str]
    """Kind of the facts in `Scene.told`, or in `Scene.terms` if `of_terms` is set."""

    of_terms: ClassVar[bool] = False

    shown: ClassVar[tuple[str, ...]] = ()
    """Names of the facts that become evidence."""

    @abstractmethod
    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""

    def chosen(self, scene: Scene) -> list[dict[str, Any]]:
        """Return the facts to report, most important first."""
        return scene.terms(self.kind) if self.of_terms else scene.told(self.kind)

    def severity_of(self, fact: Mapping[str, Any]) -> Severity:
        """Return the severity of a finding about a fact."""
        return self.severity

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first fact; it counts the lines with further ones."""
        found = self.chosen(scene)
        if not found:
            return []
        fact = found[0]
        where = fact.get("where")
        plain = {name: fact[name] for name in self.shown}
        return [
            self.finding(
                scene,
                place=Place(str(where)) if where else None,
                first_step=0,
                message=self.sentence(fact),
                severity=self.severity_of(fact),
                evidence={n: str(v) if isinstance(v, list) else v for n, v in plain.items()},
                also=len({each.get("where") for each in found}) - 1,
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if self.of_terms:
            return None if scene.objectives else "the structure of the loss is not known"
        return (
            None
            if scene.structure is not None
            else "calls are not followed; it needs `graph: true`"
        )


class SlotRule(Rule):
    """A rule about individual tensors, whose condition must hold for several consecutive records.

    A subclass declares which slots it checks (`wants`), where in a window the condition holds
    (`measure`), and the message about a slot (`sentence`). All slots that meet the condition are
    combined in one finding, located at the slot that met it first.
    """

    Parameters: ClassVar[type[RuleParameters]] = Patient

    statistics: ClassVar[tuple[str, ...]] = ()
    """Statistics that the rule requires."""

    any_statistic: ClassVar[tuple[str, ...]] = ()
    """Statistics of which the rule requires at least one."""

    lowest: ClassVar[bool] = False
    """Whether smaller evidence is worse."""

    evidence: ClassVar[str] = "value"
    """Name of the value that measures the severity of the problem."""

    backwards: ClassVar[bool] = False
    """Which slot the finding names if several first meet the condition at the same step: the last
    one in the forward pass (True), which is appropriate for gradients, or the first (False).
    """

    of_state: ClassVar[bool] = False
    """Whether the condition describes a temporary state. If so, a tensor is no longer reported once
    it has failed the condition for as many records as it had met it, and for at least `patience`
    records.
    """

    harmless: ClassVar[bool] = False
    """Whether a finding is only a hint once the loss has fallen by half and is still near its
    minimum (`Scene.learns`). True for values that are unusual but not necessarily harmful.
    """

    of_graph: ClassVar[bool] = False
    """Whether `wants` also depends on the dependency graphs."""

    of_calls: ClassVar[bool] = False
    """Whether `wants` also depends on the calls that compare predictions with targets."""

    fewest_samples: ClassVar[int] = 1
    """Minimum number of samples in the batch; records with fewer samples are ignored."""

    needs: ClassVar[str] = "outputs, such as {select: '**', capture: [output]}"
    """Captured tensors that the rule requires, named in the message if they are missing."""

    streak: Streak
    _table: SlotTable | None = None
    _known = (0, 0)  # graphs and calls from which `_at` was computed
    _at = NO_SLOTS

    def reset(self) -> None:
        """Reset the rule."""
        super().reset()
        self.streak = Streak(self.patience, lowest=self.lowest)

    @property
    def patience(self) -> int:
        """Number of consecutive records that must meet the condition."""
        return int(getattr(self.parameters, "patience", 1))

    @abstractmethod
    def wants(self, table: SlotTable) -> Mask:
        """Return a bool mask of shape [slots] of the slots to check.

        Called whenever there are new slots. If `of_graph` is set, also called for each new graph.
        If `of_calls` is set, also called for each new call that compares a prediction with a
        target.
        """

    @abstractmethod
    def measure(self, window: Window, at: Slots) -> Measured:
        """Return where the condition holds and the evidence, both of shape [records, len(at)]."""

    @abstractmethod
    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot, as one sentence."""

    def look(self, window: Window) -> None:
        """Process the next training records."""
        self._take(window)

    def _take(self, window: Window) -> None:
        at = self.columns(window.table)
        if not window.has(*self.statistics) or not len(at) or not len(window):
            return
        with np.errstate(all="ignore"):
            hit, evidence = self.measure(window, at)
        present = window.present[:, at]
        if self.fewest_samples > 1:
            present = present & (window.samples(at) >= self.fewest_samples)
        self.streak.look(
            window.steps, at, hit=hit & present, present=present, evidence=np.asarray(evidence)
        )

    def columns(self, table: SlotTable) -> Slots:
        """Return the slots to check."""
        graphs = len(self.scene.structures) if self.of_graph else 0
        known = graphs, len(self.scene.calls) if self.of_calls else 0
        if table is not self._table or known != self._known:
            self._table, self._known = table, known
            self._at = np.flatnonzero(self.wants(table))
        return self._at

    def findings(self, scene: Scene) -> list[Finding]:
        """Return one finding for all slots that meet the condition."""
        fired = self.streak.lasting if self.of_state else self.streak.fired
        if len(fired):
            fired = self.chosen(scene, fired)
        if not len(fired):
            return []
        order = self.ordered(scene, fired)
        lead, rest = int(order[0]), order[1:]
        others = list(dict.fromkeys(scene.table.place(int(slot)) for slot in rest))
        return [
            self.finding(
                scene,
                place=scene.table.place(lead),
                first_step=int(self.streak.first[lead]),
                after_step=self.streak.after_step(lead),
                last_step=int(self.streak.last[fired].max()),
                message=self.sentence(scene, lead),
                evidence=self.facts(scene, lead),
                also=len(others),
                others=tuple(others[:MOST_OTHERS]),
                **({"severity": "hint"} if self.harmless and scene.learns else {}),
            )
        ]

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Select the slots to report from those that met the condition; returns at least one."""
        return fired

    def in_every_iteration(self, scene: Scene, fired: Slots) -> Slots:
        """Return the slots whose tensor meets the condition in all of its iterations."""
        tensor = scene.table.tensors
        often = np.flatnonzero(self.streak.seen >= self.patience)
        others = tensor[np.setdiff1d(often, fired)]
        return fired[~np.isin(tensor[fired], others)]

    def ordered(self, scene: Scene, fired: Slots) -> Slots:
        """Return the slots in order of importance; the finding is located at the first slot."""
        order = scene.table.order[fired]
        return fired[np.lexsort((-order if self.backwards else order, self.streak.first[fired]))]

    def facts(self, scene: Scene, slot: int) -> dict[str, float | int | str]:
        """Return the evidence about a slot, by name."""
        return {
            self.evidence: float(self.streak.worst[slot]),
            "worst_step": int(self.streak.worst_step[slot]),
            "records": int(self.streak.records[slot]),
        }

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        absent = [name for name in self.statistics if name not in scene.statistics]
        if absent:
            return f"the statistic {absent[0]!r} is not recorded; add it to `stats`"
        if self.any_statistic and not set(self.any_statistic) & set(scene.statistics):
            names = ", ".join(f"`{name}`" for name in self.any_statistic)
            return f"none of the statistics {names} is recorded; add one of them to `stats`"
        if not len(self.columns(scene.table)):
            return f"`nodes` records no such tensor; it needs {self.needs}"
        if scene.records < self.patience:
            return f"it needs {self.patience} training records; the run has {scene.records}"
        return None

    def marks(self) -> dict[int, int]:
        """Return the slots that met the condition, with the first step."""
        return {int(slot): int(self.streak.first[slot]) for slot in self.streak.fired}


class SampledParameters(Patient):
    """Options of a rule that reads tensor values from some of the records."""

    every: Count = 10
    """Number of records between two checks. Not every record is checked, because reading values
    from the store takes time.
    """

    patience: Count = 3
    """Number of consecutive checked records that must meet the condition."""


class SampledRule(SlotRule):
    """A rule about the values of the recorded samples, read from every n-th record."""

    Parameters = SampledParameters
    what: ClassVar[str]
    """What the recorded values must contain; the message names it if it is missing."""

    _seen = False

    def look(self, window: Window) -> None:
        """Process the next training records and check every n-th of them."""
        part = window.every(self.parameters.every)
        if part is not None:
            self._take(part)

    def values(self, window: Window, row: int, slot: int) -> NDArray[np.float64] | None:
        """Return the recorded values [samples, ...] of a slot; None if there are none to check."""
        found = window.details.values(row, slot)
        if found is None or not len(found) or not self.is_meant(found):
            return None
        self._seen = True
        return np.asarray(found, np.float64)

    def is_meant(self, values: NDArray[Any]) -> bool:
        """Return whether the rule applies to the given values."""
        return True

    def measured(self, window: Window, at: Slots) -> list[tuple[int, int, NDArray[np.float64]]]:
        """Return (row, column, values) of all recorded values of the slots."""
        found = []
        for row, column in np.ndindex(len(window), len(at)):
            values = self.values(window, row, int(at[column]))
            if values is not None:
                found.append((row, column, values))
        return found

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        nothing = f"no {self.what} is recorded; it needs {self.needs}"
        return super().missing(scene) or (None if self._seen else nothing)
