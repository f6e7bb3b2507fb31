"""Determine from the order of events which optimizer step ends a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from comgra_decl.errors import did_you_mean

Optimizer = int
"""The identifier of an optimizer; the clock only compares it with others."""

Model = int
"""The identifier of a model, or part of a model, that the program calls directly."""

_PATIENCE = 8
"""If one optimizer takes this number of steps, the clock stops waiting for the others. A critic
often takes five steps for each step of its generator."""

_ODD = 100
"""The number of optimizer steps after which to warn if no training step has ended."""

_IN_VAIN = (
    f"an optimizer was expected to step, but another one stepped {_PATIENCE} times in the "
    "meantime, so the step ended without it. If both belong to one step, set schedule.step to the "
    "class name or the index of the optimizer that ends it"
)

_COUNTED_SEPARATELY = (
    "several optimizers take turns within one training step. Their first steps were counted "
    "separately, so from now on, step numbers are at least {} higher than the number of training "
    "steps. To count correctly from the start, set schedule.step to the class name or the index "
    "of "
    "the optimizer that ends a step"
)


class Seen(NamedTuple):
    """What was observed in a training step before an optimizer step.

    Attributes:
        own: the called models with parameters that this optimizer trains.
        others: the other optimizers that train parameters of called models, with those models.
        aside: whether this optimizer trains only tensors outside the called models.
    """

    own: Collection[Model]
    others: Mapping[Optimizer, Collection[Model]]
    aside: bool = False


class _Habit(NamedTuple):
    """The role of an optimizer in the last training step in which it stepped."""

    ends: bool  # whether it was the last one to step
    taken: Mapping[Optimizer, int]  # the number of steps of each optimizer in that training step


class StepClock:
    """Decides which optimizer step ends a training step.

    Optimizers belong to the same training step if their models are called in that step. For
    example, a critic's step calls the generator, so the clock waits for the generator's optimizer.
    Models that are trained one after another, or concurrently without calling each other, have
    separate steps. The clock therefore does not wait for an optimizer that has ended its steps
    alone, until that optimizer is observed to take turns with the current one.

    In steps that are not recorded, the called models are unknown, so the clock relies on what each
    optimizer did last. In such steps, the first step of a new optimizer ends a training step.

    Args:
        rule: "last_optimizer" for the behaviour above; "any" if each optimizer step ends a training
            step; "explicit" if only `comgra.step()` does; the index of an optimizer, in order of
            first steps; or the name of its class.
        warn: called with warnings.

    Attributes:
        unfamiliar: whether an optimizer ended a step only because the optimizer was new.
    """

    def __init__(self, rule: str | int = "last_optimizer", *, warn: Callable[[str], None]) -> None:
        self.rule = rule
        self.unfamiliar = False
        self._warn = warn
        self._habits: dict[Optimizer, _Habit] = {}
        self._taken: dict[Optimizer, int] = {}  # number of steps of each in this step, in order
        self._moved: set[Model] = set()  # the models that these optimizers train
        self._waiting: dict[Optimizer, Collection[Model]] = {}  # those that are expected to step
        self._given_up: set[Optimizer] = set()  # those that were expected but did not step
        # The optimizers that the last step did not wait for; None if it was not observed.
        self._left_out: Collection[Optimizer] | None = ()
        self._ender: Optimizer | None = None  # of the last step
        self._ender_before: Optimizer | None = None
        self._alternate: set[frozenset[Optimizer]] = set()  # pairs that end steps alternately
        self._turns: set[frozenset[Optimizer]] = set()  # pairs that take turns within a step
        self._in_doubt = False  # whether others may still belong to the step that ends
        self._unsure: set[Optimizer] = set()  # those that have only ended unobserved steps
        self._apart: Counter[frozenset[Optimizer]] = Counter()  # doubtful steps by their optimizers
        self._order: list[Optimizer] = []  # by first steps
        self._last: Optimizer | None = None
        self._ended = False  # whether the last optimizer step ended a training step
        self._classes: dict[
            Optimizer, str
        ] = {}  # of the optimizers that have stepped, if the rule names one
        self._is_met = False  # whether the optimizer that the rule names has ended a step
        self._others = 0  # steps of other optimizers since then

    @property
    def explicit(self) -> bool:
        """Whether only `comgra.step()` ends a step."""
        return self.rule == "explicit"

    @property
    def running(self) -> bool:
        """Whether any optimizer step has been observed."""
        return self._last is not None

    @property
    def simple(self) -> Optimizer | None:
        """The optimizer that stepped last, if all optimizer steps end training steps, else None."""
        if self.rule != "last_optimizer" or self._last not in self._habits:
            return None
        return self._last if all(habit.ends for habit in self._habits.values()) else None

    def forget(self, optimizer: Optimizer) -> None:
        """Forget an optimizer that no longer exists."""
        for known in (self._habits, self._taken, self._waiting):
            known.pop(optimizer, None)
        self._given_up.discard(optimizer)
        self._unsure.discard(optimizer)
        self._forget_apart(optimizer)

    # -- events --------------------------------------------------------------------------------

    def called(self, model: Model) -> bool:
        """Handle a model call in a recorded step; return whether the step in progress is over.

        The step is over if the model was trained in it, and the optimizers that the clock still
        waits for train no other models. Those optimizers would have stepped by now. This happens if
        a model is called as a whole and each of its layers has its own optimizer.
        """
        if model not in self._moved or not self.complete:
            return False
        self._given_up.update(self._waiting)
        self._in_doubt = True
        return True

    @property
    def complete(self) -> bool:
        """Whether the optimizers that are still expected train only models already trained.

        False if the clock waits for no optimizer, or if one of them has alternated with an
        optimizer that has stepped. An example is the third optimizer of InfoGAN, which trains the
        same models as the others.
        """
        if not self._waiting or not all(map(self._moved.issuperset, self._waiting.values())):
            return False
        pairs = (frozenset((o, taken)) for o in self._waiting for taken in self._taken)
        return self._alternate.isdisjoint(pairs)

    def stepped(
        self, optimizer: Optimizer, *, seen: Seen | None = None, classes: Collection[str] = ()
    ) -> bool:
        """Handle an optimizer step; return whether it ends the training step.

        Args:
            optimizer: the optimizer.
            seen: the observations of the training step; None if it was not observed.
            classes: the names of the optimizer's class and its base classes.
        """
        if optimizer not in self._order:
            self._order.append(optimizer)
        self._last = optimizer
        if self.rule in ("any", "explicit"):
            self._ended = self.rule == "any"
        elif self.rule == "last_optimizer":
            self._ended = self._decide(optimizer, seen)
        else:
            self._classes.setdefault(optimizer, next(iter(classes), "?"))
            self._ended = self.rule in (self._order.index(optimizer), *classes)
            self._is_met = self._is_met or self._ended
            self._count_others()
        return self._ended

    def by_program(self) -> bool:
        """Handle `comgra.step()`; return whether it ends the training step.

        It always does, with one exception: the first call has no effect if the last optimizer step
        has already ended the step.
        """
        if not self.explicit:
            self.rule = "explicit"
            if self._ended:
                self._warn(
                    "comgra.step() was called in a program that also steps optimizers. From now "
                    "on, only comgra.step() ends a step. For this behaviour from the start, set "
                    "schedule.step=explicit"
                )
                return False
        return True

    def end(self) -> None:
        """Reset the state of the step in progress when a training step ends, for any reason."""
        self._count_apart(frozenset(self._taken))
        last = next(reversed(self._taken), None)
        if last is not None and self._ender is not None:
            if last == self._ender:
                taken = self._taken.keys()
                self._alternate = {p for p in self._alternate if last not in p or p <= taken}
            elif last == self._ender_before:
                self._alternate.add(frozenset((last, self._ender)))
        self._ender_before, self._ender = self._ender, last
        for optimizer in self._taken:
            self._habits[optimizer] = _Habit(optimizer == last, self._taken)
        self._taken = {}
        self._moved.clear()
        self._waiting = {}

    # -- deciding which optimizer ends a step --------------------------------------------------

    def _decide(self, optimizer: Optimizer, seen: Seen | None) -> bool:
        times = self._taken.pop(optimizer, 0) + 1
        self._taken[optimizer] = times
        if seen is None:
            return self._by_habit(optimizer, times)
        self._moved.update(seen.own)
        self._given_up.discard(optimizer)
        if not seen.others:  # the usual case: there is nothing to wait for
            self._waiting, self._left_out, self._in_doubt = {}, (), False
            self._unsure.discard(optimizer)
            return not seen.aside or times > 1 or not self._others_end(optimizer)
        absent = {o: m for o, m in seen.others.items() if o not in self._taken}
        took_turns = optimizer != self._ender and (
            self._left_out is None or optimizer in self._left_out
        )
        pairs = {frozenset((optimizer, other)) for other in seen.others}
        if took_turns and self._left_out is None and self._stepped_before(absent):
            self._turns.update(pairs)  # a round begins; the previous one was not observed
        left_out = {o for o in absent if self._goes_alone(o, optimizer)}
        expected = absent.keys() - left_out - self._given_up
        self._waiting = {o: absent[o] for o in expected}
        if self._waiting and (times < _PATIENCE or self._amid_round(times)):
            return False
        if self._waiting:
            self._warn(_IN_VAIN)
        self._given_up.update(self._waiting)
        if took_turns:
            self._turns.update(pairs)
        self._left_out = left_out
        self._unsure.discard(optimizer)
        self._in_doubt = bool(left_out)
        return not seen.aside or times > 1 or not self._others_end(optimizer)

    def _amid_round(self, times: int) -> bool:
        """Return whether another optimizer is one step behind, so that the round is incomplete."""
        return any(taken == times - 1 for taken in self._taken.values())

    def _stepped_before(self, others: Collection[Optimizer]) -> bool:
        """Return whether the first step of the last optimizer came before those of all others."""
        first = self._order.index(self._last) if self._last is not None else 0
        return all(o in self._habits and self._order.index(o) > first for o in others)

    def _goes_alone(self, optimizer: Optimizer, beside: Optimizer) -> bool:
        """Return whether the step of `beside` ends without an optimizer that has yet to step."""
        habit = self._habits.get(optimizer)
        alone = habit is not None and len(habit.taken) == 1
        return alone and frozenset((optimizer, beside)) not in self._turns | self._alternate

    def _by_habit(self, optimizer: Optimizer, times: int) -> bool:
        habit = self._habits.get(optimizer)
        if habit is None:
            self.unfamiliar, self._left_out = True, None
            self._in_doubt = True
            self._unsure.add(optimizer)
            return True
        self._in_doubt = optimizer in self._unsure
        complete = all(self._taken.get(o, 0) >= n for o, n in habit.taken.items())
        if times <= habit.taken.get(optimizer, 0):
            return habit.ends and complete
        if not complete:  # the others have stopped stepping
            self._taken = {optimizer: 1}
        return True

    def _count_apart(self, taken: frozenset[Optimizer]) -> None:
        """Warn if steps that were counted separately turn out to be parts of one step.

        Args:
            taken: the optimizers that stepped in the step that has just ended.
        """
        doubt, self._in_doubt = self._in_doubt, False
        if not (doubt or self._apart):
            return
        if doubt:
            self._apart[taken] += 1
            if self._apart[taken] > _PATIENCE * (1 + self._apart.total() - self._apart[taken]):
                del self._apart[taken]  # it keeps stepping without taking turns
            return
        parts = {part: times for part, times in self._apart.items() if part < taken}
        rounds = min(sum(n for part, n in parts.items() if o in part) for o in taken or [0])
        higher = sum(parts.values()) - rounds
        if higher > 0:
            self._warn(_COUNTED_SEPARATELY.format(higher))
        for optimizer in taken:
            self._forget_apart(optimizer)

    def _forget_apart(self, optimizer: Optimizer) -> None:
        for part in [part for part in self._apart if optimizer in part]:
            del self._apart[part]

    def _others_end(self, optimizer: Optimizer) -> bool:
        """Return whether another optimizer ends steps.

        If so, an optimizer that trains no model, such as one for the temperature of an actor-critic
        algorithm, belongs to those steps.
        """
        return any(habit.ends for other, habit in self._habits.items() if other != optimizer)

    def _count_others(self) -> None:
        self._others = 0 if self._ended else self._others + 1
        if self._others == _ODD:
            self._warn(
                f"schedule.step: {self.rule!r} has not ended any step in the last {_ODD} optimizer "
                f"steps; {self._those_that_stepped()}"
            )

    @property
    def in_vain(self) -> str | None:
        """A warning if the optimizer that the rule names has never ended a step, else None."""
        if not self._classes or self._is_met or self.explicit or self._others >= _ODD:
            return None
        return f"schedule.step: {self.rule!r} has not ended any step; {self._those_that_stepped()}"

    def _those_that_stepped(self) -> str:
        names = list(self._classes.values())
        numbered = ", ".join(f"{number} {name}" for number, name in enumerate(names))
        listed = numbered if isinstance(self.rule, int) else ", ".join(dict.fromkeys(names))
        return f"the optimizers that stepped are {listed}{did_you_mean(self.rule, names)}"
