"""Which steps are recorded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from comgra_decl.errors import did_you_mean
from comgra_decl.spec.base import Int, Number, SpecModel
from comgra_decl.spec.budget import BudgetSpec

ENDS = ("last_optimizer", "any", "explicit")
"""What may end a step, beside a certain optimizer."""

_Count = Annotated[Int, Field(ge=0)]
_Times = Annotated[Int, Field(ge=1)]


def _ascending(steps: list[int]) -> list[int]:
    return sorted(set(steps))


def _pair(window: list[int]) -> list[int]:
    if len(window) != 2:
        raise ValueError(f"{window} is no pair of numbers; write [first, last]")
    return window


def _merged(windows: list[list[int]]) -> list[list[int]]:
    """Windows in order, those that touch made one."""
    merged: list[list[int]] = []
    for first, last in sorted(windows):
        if first > last:
            raise ValueError(f"the window [{first}, {last}] ends before it begins")
        if merged and first <= merged[-1][1] + 1:
            merged[-1][1] = max(last, merged[-1][1])
        else:
            merged.append([first, last])
    return merged


def _index_as_number(value: object) -> object:
    """An index that came as text, from a command line for example, is an index."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _end_of_step(rule: str) -> str:
    """A word of ours, or a class: those begin with a capital, and the rest is a slip."""
    if rule not in ENDS and not rule[:1].isupper():
        raise ValueError(
            f"{rule!r} is not one of {', '.join(ENDS)}, the number of an optimizer or the name of "
            f"its class{did_you_mean(rule, ENDS)}"
        )
    return rule


class CadenceSpec(SpecModel):
    """Which of a series of countable things are recorded; they count from 0.

    The first `first` are recorded, then the multiples of `every`. With a `backoff` above 1 the k-th
    gap between them is `every * backoff**k`, rounded down. `windows` and `seconds` add to this.
    """

    first: _Count = 1
    """So many from the start are all recorded."""

    every: _Times | None = 1
    """After those, every so many-th is recorded; null for none."""

    backoff: Annotated[Number, Field(ge=1)] = 1.0
    """Each gap is so many times longer than the one before; 1 keeps them equal."""

    steps: Annotated[list[_Count], Field(min_length=1), AfterValidator(_ascending)] | None = None
    """Exactly these and no others; `first`, `every` and `backoff` are then not used."""

    windows: Annotated[
        list[Annotated[list[_Count], AfterValidator(_pair)]], AfterValidator(_merged)
    ] = []
    """Pairs [first, last]: everything between them, both included, is recorded as well."""

    seconds: Annotated[Number, Field(gt=0)] | None = None
    """Record the next one whenever so many seconds have passed since the last record."""


class EvalSpec(CadenceSpec):
    """Which evaluation phases are recorded, and how much of each; phases count from 0.

    A phase begins when the program switches a model to evaluation.
    """

    batches: _Times | Literal["all"] | None = None
    """Model calls of a phase that are recorded, each as an iteration of its nodes; null for as many
    as the last training step had, which is one for most programs; all for the whole phase, up to
    2000 calls."""


class TypeCadenceSpec(CadenceSpec):
    """Which of the steps of one type are recorded; only those are counted."""

    budget: BudgetSpec = BudgetSpec()
    """What the records of this type may cost, beside what `schedule.budget` allows all records
    together; under "*" each type not named has one of its own. A step of several types must be
    within the budget of each."""


class ScheduleSpec(CadenceSpec):
    """Which training steps are recorded; steps count from 0."""

    first: _Count = 10
    """So many steps from the start are all recorded."""

    every: _Times | None = 1
    """After those, every so many-th step is recorded; null for none."""

    sudden: _Times | None = None
    """After a loss that suddenly is not finite, or far above those before it, so many following
    steps are recorded, from at most 32 steps or a quarter of a second later (a loss on a device:
    from about a second later). At most 16 times in a run; not with `steps`, nor on several ranks.
    It needs `kpis: {loss: true}`; null for none. What was before the loss is what `keep` is for."""

    types: dict[str, TypeCadenceSpec | None] = {}
    """A cadence of its own for steps of a type, or with a tag, of this name; "*" stands for all
    names not given, null means never. `windows` and `seconds` of the schedule hold for all types
    but those. A type without an entry follows the schedule; one seen for the first time is recorded
    at once. With `steps`, types have no say."""

    eval: EvalSpec | None = EvalSpec()
    """Evaluation phases to record; null for none."""

    budget: BudgetSpec = BudgetSpec()
    """What recording may cost; records become rarer when it costs more."""

    step: Annotated[
        Annotated[Int, Field(ge=0)] | Annotated[str, AfterValidator(_end_of_step)],
        BeforeValidator(_index_as_number),
    ] = "last_optimizer"
    """What ends a training step. last_optimizer: the optimizer's step; where optimizers train
    models that call each other in a step (a critic and its generator), that of the last of them.
    any: each step of any optimizer; explicit: `comgra.step()` only; a number or a class such as
    Adam: the steps of that optimizer, counted from 0 in the order in which they first step.
    Whatever this says, a program that calls `comgra.step()` ends its steps there."""

    max_iterations: _Times | None = 256
    """At most so many iterations of a node are recorded of one step, which the run's report says;
    null for all. A step has many where a cell is called for each time step, or where an optimizer
    evaluates its closure again and again."""

    @property
    def type_budgets(self) -> dict[str, BudgetSpec]:
        """The budgets of types of execution; with `steps`, types have no say."""
        own = {} if self.steps is not None else self.types
        return {name: each.budget for name, each in own.items() if each is not None}

    @property
    def limits_disk(self) -> bool:
        """Whether the size of the run's folder has a say."""
        budgets = (self.budget, *self.type_budgets.values())
        return any(each.bytes is not None for each in budgets)
