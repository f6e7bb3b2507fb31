"""What a rule is. A new one is a class in a file of its own; see `docs/findings.md`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from comgra_decl.records import SlotInfo, Structure
from comgra_decl.rules.finding import MOST_OTHERS, Finding, Severity
from comgra_decl.rules.memory import Bools, Slots, Streak
from comgra_decl.rules.table import Mask, SlotTable
from comgra_decl.rules.window import Numbers, Window
from comgra_decl.spec.base import Int, Number, SpecModel

Count = Annotated[Int, Field(ge=1)]
"""A whole number, at least 1."""

Positive = Annotated[Number, Field(gt=0)]
"""A number above 0."""

Share = Annotated[Number, Field(gt=0, le=1)]
"""A number above 0, at most 1."""

Fraction = Annotated[Number, Field(gt=0, lt=1)]
"""A number above 0 and below 1."""

Factor = Annotated[Number, Field(gt=1)]
"""A number above 1."""

Measured = tuple[Bools, NDArray[Any]]
"""In which records and slots something is wrong, and the evidence, both [k, slots]."""


class RuleParameters(SpecModel):
    """What can be said of a rule in the spec."""

    severity: Severity | None = None
    """`error`, `warning` or `hint`, instead of what the rule itself says."""


class Patient(RuleParameters):
    """What can be said of a rule that waits until something has been so for a while."""

    patience: Count = 5
    """For so many records in a row it must be so."""


@dataclass
class Scene:
    """What is known of the run beside the records themselves.

    Attributes:
        table: the slots.
        statistics: names of the recorded statistics.
        structures: the dependency graphs of the records until now, by their hash.
        reshaped: by the same hash, the slots that had another shape than the slot table says in the
            first record of that graph.
        structure: that of the newest record which has one.
        documents: "modules" and "report", as the run holds them.
        records: number of records of the training until now.
        evaluations: number of records of evaluations.
        last_step: that of the newest record or number; -1 before there is one.
        has_histograms: whether records hold histograms.
    """

    table: SlotTable = field(default_factory=SlotTable)
    statistics: tuple[str, ...] = ()
    structures: dict[str, Structure] = field(default_factory=dict)
    reshaped: dict[str, dict[int, SlotInfo]] = field(default_factory=dict)
    structure: Structure | None = None
    documents: dict[str, Any] = field(default_factory=dict)
    records: int = 0
    evaluations: int = 0
    last_step: int = -1
    has_histograms: bool = False

    @property
    def parameters(self) -> dict[tuple[str, str], Mapping[str, Any]]:
        """What is known of each parameter (`trainable`, `shape`, ...), by node and role."""
        found = {}
        for module in self.documents.get("modules") or []:
            for name, facts in module["parameters"].items():
                found[module["node"], name] = facts
        return found


class Rule(ABC):
    """Watches a run and says what is wrong with it.

    The same object looks at a run while it is being recorded, and another of its class at the
    stored run; both must find the same, whatever windows the records come in.
    """

    name: ClassVar[str]
    """What it is called in the spec, in findings and in the documentation."""

    severity: ClassVar[Severity] = "warning"
    """How bad what it finds is."""

    certainty: ClassVar[float] = 0.5
    """How sure a finding of this rule is, from 0 to 1."""

    definition: ClassVar[str]
    """What exactly it looks for."""

    source: ClassVar[str]
    """Where the definition and the default come from."""

    advice: ClassVar[str]
    """What to do about it."""

    explained_by: ClassVar[tuple[str, ...]] = ()
    """Rules whose findings explain what this one finds later."""

    Parameters: ClassVar[type[RuleParameters]] = RuleParameters
    """What can be said of it in the spec, and the defaults."""

    def __init__(self, parameters: RuleParameters | None = None) -> None:
        self.parameters: Any = self.Parameters() if parameters is None else parameters
        self.scene = Scene()
        """What is known of the run by now; an engine puts its own here."""

    def look(self, window: Window) -> None:  # noqa: B027  (most rules take one of these three)
        """Takes the next records of the training."""

    def look_at_evaluation(self, window: Window) -> None:  # noqa: B027
        """Takes the next records of evaluations."""

    def look_at_skipped(self, window: Window) -> None:  # noqa: B027
        """Takes the next records with the gradients that mixed precision threw away.

        `look` gets the same records without them: they are as if not recorded.
        """

    def look_at_numbers(self, numbers: Numbers) -> None:  # noqa: B027
        """Takes the next numbers of one name and type of execution."""

    @abstractmethod
    def findings(self, scene: Scene) -> list[Finding]:
        """Returns what it has found until now."""

    @abstractmethod
    def missing(self, scene: Scene) -> str | None:
        """Returns why it could not look, and what to add to the spec; None if it could."""

    def follows(self, finding: Finding, other: Finding) -> bool:
        """Whether a finding of this rule is explained by one of another rule."""
        return other.rule in self.explained_by

    def marks(self) -> dict[int, int]:
        """Returns the slots that it has found something about, with the first step."""
        return {}

    def finding(self, scene: Scene, **facts: Any) -> Finding:
        """Returns a finding of this rule; `facts` are what its class does not know."""
        severity = self.parameters.severity or facts.pop("severity", self.severity)
        facts.pop("severity", None)
        facts.setdefault("advice", self.advice)
        facts.setdefault("certainty", self.certainty)
        facts.setdefault("last_step", scene.last_step)
        return Finding(rule=self.name, severity=severity, **facts)


class SlotRule(Rule):
    """A rule about single tensors: something must be so for some records in a row.

    A rule of this kind says which slots it is about (`wants`), where in a window it is so
    (`measure`), and what to say of a slot (`sentence`). All slots that show it make one finding,
    at the one that showed it first.
    """

    Parameters: ClassVar[type[RuleParameters]] = Patient
    statistics: ClassVar[tuple[str, ...]] = ()
    """Names of the statistics that it needs."""

    any_statistic: ClassVar[tuple[str, ...]] = ()
    """Names of statistics of which it needs one, whichever."""

    lowest: ClassVar[bool] = False
    """Whether small evidence is worse than large evidence."""

    evidence: ClassVar[str] = "value"
    """What the number is that tells how bad it is."""

    backwards: ClassVar[bool] = False
    """Whether, of slots that show it from the same step on, the last one of the network's forward
    pass is the first one to show it: so with gradients."""

    of_graph: ClassVar[bool] = False
    """Whether `wants` depends on the dependency graphs, too."""

    fewest_samples: ClassVar[int] = 1
    """Records with fewer samples in the batch are as if they were not there."""

    needs: ClassVar[str] = "outputs, such as {select: '**', capture: [output]}"
    """What must be captured that there are slots to look at."""

    def __init__(self, parameters: RuleParameters | None = None) -> None:
        super().__init__(parameters)
        self.streak = Streak(self.patience, lowest=self.lowest)
        self._table: SlotTable | None = None
        self._graphs = 0
        self._at: Slots = np.zeros(0, np.int64)
        self._able = True

    @property
    def patience(self) -> int:
        """For so many records in a row it must be so."""
        return int(getattr(self.parameters, "patience", 1))

    @abstractmethod
    def wants(self, table: SlotTable) -> Mask:
        """Returns which slots it looks at, [n].

        Asked when there are new slots and, with `of_graph`, when there is another graph.
        """

    @abstractmethod
    def measure(self, window: Window, at: Slots) -> Measured:
        """Returns in which records and slots it is so, and the evidence, both [k, len(at)]."""

    @abstractmethod
    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns what is wrong with a slot, in one sentence."""

    def look(self, window: Window) -> None:
        """Takes the next records of the training."""
        self._take(window)

    def _take(self, window: Window) -> None:
        self._able = window.has(*self.statistics)
        at = self.columns(window.table)
        if not self._able or not len(at) or not len(window):
            return
        with np.errstate(all="ignore"):
            hit, evidence = self.measure(window, at)
        there = window.present[:, at]
        if self.fewest_samples > 1:
            there = there & (window.samples(at) >= self.fewest_samples)
        self.streak.look(
            window.steps, at, hit=hit & there, present=there, evidence=np.asarray(evidence)
        )

    def columns(self, table: SlotTable) -> Slots:
        """Returns the slots it looks at."""
        graphs = len(self.scene.structures) if self.of_graph else 0
        if table is not self._table or graphs != self._graphs:
            self._table, self._graphs = table, graphs
            self._at = np.flatnonzero(self.wants(table))
        return self._at

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns one finding for all slots that show it."""
        fired = self.streak.fired
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
                last_step=int(self.streak.last[fired].max()),
                message=self.sentence(scene, lead),
                evidence=self.facts(scene, lead),
                also=len(others),
                others=tuple(others[:MOST_OTHERS]),
            )
        ]

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Returns those of the slots with a streak (one at least) that are worth a finding."""
        return fired

    def in_every_iteration(self, scene: Scene, fired: Slots) -> Slots:
        """Returns those of the slots whose tensor shows it in all iterations: a state may be 0."""
        tensor = scene.table.tensors
        often = np.flatnonzero(self.streak.seen >= self.patience)
        others = tensor[np.setdiff1d(often, fired)]
        return fired[~np.isin(tensor[fired], others)]

    def ordered(self, scene: Scene, fired: Slots) -> Slots:
        """Returns the slots, the one that shows it first at the front."""
        order = scene.table.order[fired]
        return fired[np.lexsort((-order if self.backwards else order, self.streak.first[fired]))]

    def facts(self, scene: Scene, slot: int) -> dict[str, float | int | str]:
        """Returns the evidence about a slot."""
        return {
            self.evidence: float(self.streak.worst[slot]),
            "worst_step": int(self.streak.worst_step[slot]),
            "records": int(self.streak.records[slot]),
        }

    def missing(self, scene: Scene) -> str | None:
        """Returns why it could not look."""
        absent = [name for name in self.statistics if name not in scene.statistics]
        if absent:
            return f"the statistic {absent[0]!r} is not recorded; add it to `stats`"
        if self.any_statistic and not set(self.any_statistic) & set(scene.statistics):
            names = ", ".join(f"`{name}`" for name in self.any_statistic)
            return f"none of the statistics {names} is recorded; add one of them to `stats`"
        if not self.wants(scene.table).any():
            return f"nothing of the kind is recorded; add to `nodes`: {self.needs}"
        if scene.records < self.patience:
            return f"it takes {self.patience} records of training steps; there are {scene.records}"
        return None

    def marks(self) -> dict[int, int]:
        """Returns the slots that show it, with the first step."""
        return {int(slot): int(self.streak.first[slot]) for slot in self.streak.fired}


class SampledParameters(Patient):
    """What can be said of a rule that looks at some of the records."""

    every: Count = 10
    """Every so many records are looked at, since their values have to be read."""

    patience: Count = 3
    """For so many of these in a row it must be so."""


class SampledRule(SlotRule):
    """A rule about the values of the recorded samples, at every so many-th record."""

    Parameters = SampledParameters
    what: ClassVar[str]
    """What must be among the values that are recorded."""

    def __init__(self, parameters: Any = None) -> None:
        super().__init__(parameters)
        self._seen = False

    def look(self, window: Window) -> None:
        """Takes those of the next records whose turn it is."""
        number = window.first + np.arange(len(window))
        rows = np.flatnonzero(number % self.parameters.every == 0)
        if len(rows):
            self._take(window.only(rows, int(number[rows[0]])))

    def values(self, window: Window, row: int, slot: int) -> NDArray[np.float64] | None:
        """Returns the values [samples, ...] that a record holds of a slot and that are meant."""
        found = window.details.values(row, slot)
        if found is None or not len(found) or not self.is_meant(found):
            return None
        self._seen = True
        return np.asarray(found, np.float64)

    def is_meant(self, values: NDArray[Any]) -> bool:
        """Whether the rule is about values like these."""
        return True

    def measured(self, window: Window, at: Slots) -> list[tuple[int, int, NDArray[np.float64]]]:
        """Returns row, column and values of all that is recorded of the slots."""
        found = []
        for row, column in np.ndindex(len(window), len(at)):
            values = self.values(window, row, int(at[column]))
            if values is not None:
                found.append((row, column, values))
        return found

    def missing(self, scene: Scene) -> str | None:
        """Returns why it could not look."""
        nothing = f"no {self.what} is recorded; add to `nodes`: {self.needs}"
        return super().missing(scene) or (None if self._seen else nothing)
