"""Which steps are recorded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from comgra_decl.errors import did_you_mean
from comgra_decl.spec.base import Int, Number, SpecModel
from comgra_decl.spec.budget import BudgetSpec

ENDS = ("last_optimizer", "any", "explicit")
"""What may end a step, other than a particular optimizer."""

_Count = Annotated[Int, Field(ge=0)]
_Times = Annotated[Int, Field(ge=1)]


def _ascending(steps: list[int]) -> list[int]:
    return sorted(set(steps))


def _pair(window: list[int]) -> list[int]:
    if len(window) != 2:
        raise ValueError(f"{window} must be a pair of numbers, [first, last]")
    return window


def _merged(windows: list[list[int]]) -> list[list[int]]:
    """Sort windows and merge those that overlap or touch."""
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
    """Convert an index given as a string, for example on a command line, to int."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _end_of_step(rule: str) -> str:
    """Accept one of `ENDS` or a class name; a name without a capital is taken for a typo."""
    if rule not in ENDS and not rule[:1].isupper():
        raise ValueError(
            f"{rule!r} is not one of {', '.join(ENDS)}, the index of an optimizer or the name of "
            f"its class{did_you_mean(rule, ENDS)}"
        )
    return rule


class CadenceSpec(SpecModel):
    """Which items of a sequence are recorded, counted from 0.

    The first `first` are recorded, then the multiples of `every`. With a `backoff` above 1, the
    k-th gap between them is `every * backoff**k`, rounded down. `windows` and `seconds` add further
    records.
    """

    first: _Count = 1
    """Number of items at the start that are all recorded."""

    every: _Times | None = 1
    """After those, every n-th item is recorded; null for none."""

    backoff: Annotated[Number, Field(ge=1)] = 1.0
    """Factor by which each gap is longer than the previous one; 1 keeps gaps equal."""

    steps: Annotated[list[_Count], Field(min_length=1), AfterValidator(_ascending)] | None = None
    """Record exactly these; `first`, `every` and `backoff` are then ignored."""

    windows: Annotated[
        list[Annotated[list[_Count], AfterValidator(_pair)]], AfterValidator(_merged)
    ] = []
    """Pairs [first, last]: also record everything from first to last, inclusive."""

    seconds: Annotated[Number, Field(gt=0)] | None = None
    """Record the next item whenever this many seconds have passed since the last record."""


class EvalSpec(CadenceSpec):
    """Which evaluation phases are recorded, and how much of each; phases count from 0.

    A phase begins when the program switches a model to evaluation mode.
    """

    batches: _Times | Literal["all"] | None = None
    """Number of model calls to record in a phase, each as an iteration of its nodes; null for the
    number of calls in the last training step, which is one for most programs; `all` for the whole
    phase, up to 2000 calls."""


class TypeCadenceSpec(CadenceSpec):
    """Which steps of one type are recorded; only steps of that type are counted."""

    budget: BudgetSpec = BudgetSpec()
    """Budget for the records of this type, in addition to the overall `schedule.budget`; under "*",
    each type without an entry has its own budget. A step of several types must be within the budget
    of each."""


class ScheduleSpec(CadenceSpec):
    """Which training steps are recorded; steps count from 0."""

    first: _Count = 10
    """Number of steps at the start that are all recorded."""

    every: _Times | None = 1
    """After those, every n-th step is recorded; null for none."""

    sudden: _Times | None = None
    """After a loss that suddenly is not finite, or far above those before it, so many following
    steps are recorded, from at most 32 steps or a quarter of a second later (a loss on a device:
    from about a second later). At most 16 times in a run; not with `steps`, nor on several ranks.
    It needs `kpis: {loss: true}`; null for none. What was before the loss is what `keep` is for."""

    types: dict[str, TypeCadenceSpec | None] = {}
    """Separate cadence for steps of a type, or with a tag, of this name; "*" stands for all names
    not given, null means never. `windows` and `seconds` of the schedule apply to all types except
    those set to null. A type without an entry follows the schedule; the first step of a new type is
    always recorded. Ignored if `steps` is given."""

    eval: EvalSpec | None = EvalSpec()
    """Evaluation phases to record; null for none."""

    budget: BudgetSpec = BudgetSpec()
    """Limits on the cost of recording; records become less frequent to stay within them."""

    step: Annotated[
        Annotated[Int, Field(ge=0)] | Annotated[str, AfterValidator(_end_of_step)],
        BeforeValidator(_index_as_number),
    ] = "last_optimizer"
    """What ends a training step. last_optimizer: a step of the optimizer; if several optimizers
    train models that call each other within a step (critic and generator), a step of the last of
    them. any: each step of any optimizer; explicit: only `comgra.step()`; an index, or a class such
    as Adam: the steps of that optimizer, counted from 0 in the order of their first steps. A
    program that calls `comgra.step()` ends its steps there, regardless of this setting."""

    max_iterations: _Times | None = 256
    """Maximum number of iterations of a node to record in one step; the run's report states if more
    were dropped. null for all. A step has many iterations if a cell is called for each time step,
    or if an optimizer evaluates its closure repeatedly."""

    @property
    def type_budgets(self) -> dict[str, BudgetSpec]:
        """The budgets of types of execution; empty with `steps`, which disables types."""
        own = {} if self.steps is not None else self.types
        return {name: each.budget for name, each in own.items() if each is not None}

    @property
    def limits_disk(self) -> bool:
        """Whether any budget limits the size of the run's folder."""
        budgets = (self.budget, *self.type_budgets.values())
        return any(each.bytes is not None for each in budgets)
