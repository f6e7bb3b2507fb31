"""Which steps are recorded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from comgra_decl.errors import did_you_mean
from comgra_decl.spec.base import Int, Number, SpecModel
from comgra_decl.spec.budget import BudgetSpec

ENDS = ("last_optimizer", "any", "explicit")
"""The rules that determine what ends a step; a particular optimizer can be named instead."""

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
    """Convert an index given as a string, such as on a command line, to an int."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _end_of_step(rule: str) -> str:
    """Accept one of `ENDS` or a class name; a lower-case name is treated as a typo."""
    if rule not in ENDS and not rule[:1].isupper():
        raise ValueError(
            f"{rule!r} is not one of {', '.join(ENDS)}, the index of an optimizer or the name of "
            f"its class{did_you_mean(rule, ENDS)}"
        )
    return rule


class CadenceSpec(SpecModel):
    """Which items of a sequence are recorded, counted from 0.

    The first `first` items are recorded, then all multiples of `every`. With a `backoff` above 1,
    the k-th gap between records is `every * backoff**k`, rounded down. `windows` and `seconds` add
    further records.
    """

    first: _Count = 1
    """Number of items at the start, all of which are recorded."""

    every: _Times | None = 1
    """After the first items, every n-th item is recorded; null for none."""

    backoff: Annotated[Number, Field(ge=1)] = 1.0
    """Factor between each gap and the previous one; with 1, all gaps are equal."""

    steps: Annotated[list[_Count], Field(min_length=1), AfterValidator(_ascending)] | None = None
    """The items to record. If given, `first`, `every` and `backoff` are ignored."""

    windows: Annotated[
        list[Annotated[list[_Count], AfterValidator(_pair)]], AfterValidator(_merged)
    ] = []
    """Pairs [first, last]. All items from first to last, inclusive, are recorded as well."""

    seconds: Annotated[Number, Field(gt=0)] | None = None
    """If this many seconds have passed since the last record, the next item is recorded."""


class EvalSpec(CadenceSpec):
    """Which evaluation phases are recorded, and how many calls of each; phases are counted from 0.

    A phase begins when the program switches a model to evaluation mode.
    """

    batches: _Times | Literal["all"] | None = None
    """Number of model calls to record in a phase; each call is an iteration of the model's nodes.
    null: as many calls as the last training step made, which is one for most programs. `all`: the
    whole phase, up to 2000 calls."""


class ReplaySpec(SpecModel):
    """What is kept with a checkpoint to repeat its step, and the next ones, with `comgra.replay`.

    The batch, the states of the generators, and those of the optimizer, which take twice as much
    space as the model for Adam.
    """

    steps: _Times = 1
    """How many steps to keep from each checkpoint on, including its own. These steps are recorded
    regardless of the schedule."""


def _replay(value: object) -> object:
    """Return the long form of `replay: true`."""
    return {} if value is True else None if value is False else value


class CheckpointsSpec(CadenceSpec):
    """Which recorded training steps get a checkpoint; only recorded training steps are counted.

    A checkpoint contains all parameters and buffers with which the step's forward pass began, so it
    takes as much space as the model. It is stored only if it takes at most half of the space that
    `schedule.budget.disk` leaves.
    """

    every: _Times | None = 50
    """After the first recorded steps, every n-th one gets a checkpoint; null for none."""

    replay: Annotated[ReplaySpec | None, BeforeValidator(_replay)] = None
    """`true` or {steps: 3} keeps with each checkpoint what it takes to repeat the step; see
    `comgra.replay`."""


class TypeCadenceSpec(CadenceSpec):
    """Which steps of one type are recorded; only steps of that type are counted."""

    budget: BudgetSpec = BudgetSpec()
    """Budget for records of this type, in addition to the overall `schedule.budget`. Under "*",
    each type without an entry of its own has a separate budget. A step with several types is
    recorded only if it is within the budget of every one of them."""


class ScheduleSpec(CadenceSpec):
    """Which training steps are recorded; steps are counted from 0."""

    first: _Count = 10
    """Number of steps at the start, all of which are recorded."""

    every: _Times | None = 1
    """After the first steps, every n-th step is recorded; null for none."""

    sudden: _Times | None = None
    """Number of steps to record after a loss that is not finite or is far above the earlier losses;
    null for none. Recording starts within 32 steps or a quarter of a second (about a second for a
    loss on a device). This happens at most 16 times in a run. Requires `kpis: {loss: true}`; has no
    effect with `steps` or on multiple ranks. To store the steps that precede such a loss, use
    `keep`."""

    types: dict[str, TypeCadenceSpec | None] = {}
    """Separate schedules for steps with this type or tag, by name; "*" stands for all other names,
    and null means never. `windows` and `seconds` of the schedule apply to all types except those
    set to null. A type without an entry follows the schedule; the first step of a new type is
    always recorded. Ignored if `steps` is given."""

    eval: EvalSpec | None = EvalSpec()
    """Which evaluation phases to record; null for none."""

    budget: BudgetSpec = BudgetSpec()
    """Limits on the cost of recording; records become less frequent to stay within them."""

    step: Annotated[
        Annotated[Int, Field(ge=0)] | Annotated[str, AfterValidator(_end_of_step)],
        BeforeValidator(_index_as_number),
    ] = "last_optimizer"
    """What ends a training step. last_optimizer: a step of the optimizer; if several optimizers
    train models that call each other within a step, such as a critic and a generator, the step of
    the last of these optimizers. any: each step of any optimizer. explicit: only `comgra.step()`. A
    class name such as Adam, or an index: the steps of that optimizer; optimizers are counted from 0
    in the order of their first steps. If the program calls `comgra.step()`, only those calls end
    steps, regardless of this setting."""

    max_iterations: _Times | None = 256
    """Maximum number of iterations to record for each node in one step; null for no limit. The
    run's report states whether further iterations were dropped. A node has many iterations if, for
    example, a cell is called for each time step, or an optimizer evaluates its closure
    repeatedly."""

    @property
    def type_budgets(self) -> dict[str, BudgetSpec]:
        """The budgets by type of execution. Empty if `steps` is set, as that disables types."""
        own = {} if self.steps is not None else self.types
        return {name: each.budget for name, each in own.items() if each is not None}

    @property
    def limits_disk(self) -> bool:
        """Whether any budget limits the size of the run's folder."""
        budgets = (self.budget, *self.type_budgets.values())
        return any(each.bytes is not None for each in budgets)
