"""Threads that train side by side: each has steps of its own, and one at a time is recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any

from comgra_decl.hooks.call_context import is_called_by_module
from comgra_decl.hooks.cross_thread import act_for, here
from comgra_decl.hooks.other_threads import alive
from comgra_decl.hooks.schedule.agenda import Plan

if TYPE_CHECKING:
    from comgra_decl.hooks.declared import Declared
    from comgra_decl.hooks.hand_updates import HandUpdates
    from comgra_decl.hooks.optimizers import CalledModels
    from comgra_decl.hooks.record_hooks import RecordHooks
    from comgra_decl.hooks.report import Reporter
    from comgra_decl.hooks.scalars.losses import LossWatch
    from comgra_decl.hooks.scalars.scalars import Saying, Scalars
    from comgra_decl.hooks.schedule.evaluation import EvaluationPhases
    from comgra_decl.hooks.schedule.idle import IdleSteps
    from comgra_decl.hooks.step_clock import StepClock
    from comgra_decl.hooks.step_records import StepRecords
    from comgra_decl.hooks.step_state import StepState

_PATIENCE = 4
"""Steps of a thread for which it leaves a record to another one whose turn it is."""

_STALE = 1000
"""Steps of other threads after which a record that one has begun is given up."""

IN_TURNS = (
    "several threads train. Steps are numbered in the order in which they end, across threads; one "
    "step is recorded at a time, and the threads take turns"
)


@dataclass(eq=False)
class Lane:
    """The steps of one thread.

    Attributes:
        thread: which one; 0 while nobody has trained.
        clock: tells its steps apart.
        hand: likewise, where no optimizer of torch does.
        saying: what was said of its step in progress.
        labels: of that step.
        record: its step that was recorded last.
        waited: steps of its own since it began to leave a record to another thread.
        waits: whether others still leave a record to it; not, once they have done so in vain.
        calls: whether it was seen to call a model; None: nobody has looked.
        helper: another one that calls `backward` for it; 0: none does.
    """

    thread: int
    clock: StepClock
    hand: HandUpdates
    saying: Saying
    labels: dict[str, None] = field(default_factory=dict)
    record: int = -1
    waited: int = 0
    waits: bool = True
    calls: bool | None = None
    helper: int = 0


class Lanes:
    """The threads that train, and which of them is followed.

    Args:
        first: that of the thread that trains first.

    Attributes:
        several: whether more than one thread trains.
        followed: the one whose step is recorded, or that has done something last.
        owed: whether a record is due that the followed one was not given.
        passed: steps of others that ended since the followed one began the step in progress.
        refused: how often another one would have begun the record that this one has not begun.
    """

    def __init__(self, first: Lane) -> None:
        self._all = [first]
        self.several = False
        self.followed = first
        self.owed = False
        self.passed = 0
        self.refused = 0

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._all)

    def of(self, thread: int) -> Lane | None:
        """Returns that of a thread; None if it was not seen to train."""
        return next((lane for lane in self._all if lane.thread == thread), None)

    def is_beside(self, thread: int) -> bool:
        """Whether a thread trains and is not the one that is followed."""
        lane = self.of(thread)
        return lane is not None and lane is not self.followed

    def add(self, lane: Lane) -> None:
        """Another thread trains."""
        self._all.append(lane)
        self.several = True

    def prune(self) -> list[Lane]:
        """Forgets threads that have ended, and returns theirs."""
        threads = alive()
        gone = [x for x in self._all if x is not self.followed and x.thread not in threads]
        self._all = [lane for lane in self._all if lane not in gone]
        self.several = len(self._all) > 1
        return gone

    @property
    def stale(self) -> bool:
        """Whether a record that the followed thread has begun is not waited for any longer."""
        gone = self.followed.thread not in alive()
        return gone or self.passed >= _STALE

    def tired(self) -> bool:
        """Whether another thread, whose step ends, takes over the record that has not begun yet."""
        self.refused += 1
        return self.refused > _PATIENCE * len(self._all)

    def leaves(self) -> bool:
        """Whether the followed thread leaves the record that is due to one whose turn it is."""
        mine = self.followed
        older = [lane for lane in self._all if lane.record < mine.record and lane.waits]
        if older and mine.waited < _PATIENCE:
            mine.waited += 1
            return True
        for lane in older:
            lane.waits = False
        mine.waited = 0
        return False


class Turns:
    """Lets one of the threads that train be followed at a time, and the record go round.

    Args:
        lanes: the threads that train.
        new_lane: returns the lane of a thread that was not seen before.
        declared: what depends on the spec.
        state: the step in progress of the thread that is followed.
        records: gives up its record.
        hooks: what sits on the program meanwhile.
        evaluation: the phases of evaluation and their record.
        losses: looks at `backward` in the thread that calls it.
        scalars: takes the numbers of steps.
        idle: counts steps in which nothing happens.
        called: notes which models a step has called.
        reporter: is told what is odd.
        announce: called when another thread is seen to train.
    """

    def __init__(
        self,
        lanes: Lanes,
        *,
        new_lane: Callable[[int], Lane],
        declared: Declared,
        state: StepState,
        records: StepRecords,
        hooks: RecordHooks,
        evaluation: EvaluationPhases,
        losses: LossWatch,
        scalars: Scalars,
        idle: IdleSteps,
        called: CalledModels,
        reporter: Reporter,
        announce: Callable[[], None],
    ) -> None:
        self._lanes = lanes
        self._new_lane = new_lane
        self._declared = declared
        self._state = state
        self._records = records
        self._hooks = hooks
        self._evaluation = evaluation
        self._losses = losses
        self._scalars = scalars
        self._idle = idle
        self._called = called
        self._reporter = reporter
        self._announce = announce

    @property
    def clock(self) -> StepClock:
        """Decides which optimizer's step ends a step of the thread that is followed."""
        return self._lanes.followed.clock

    @property
    def hand(self) -> HandUpdates:
        """Knows when its step is over though no optimizer has stepped."""
        return self._lanes.followed.hand

    def thread_to_follow(self) -> int:
        """Returns the thread whose calls a record that begins now follows; 0: whichever calls."""
        lane = self._lanes.followed
        if self._lanes.several or (lane.calls and not is_called_by_module(sys._getframe(1))):
            return lane.thread
        if lane.calls:
            return here()
        if lane.calls is None and lane.thread in (0, here()):
            return here() if self._state.number else 0  # armed by the step before
        return 0

    def turn_here(self) -> bool:
        """Follows this thread, if it is one of several that train and the others allow it."""
        lane = self._lanes.of(here()) if self._lanes.several else None
        return lane is not None and self._turn_to(lane)

    def abandoned(self) -> bool:
        """Whether the thread whose step would be recorded next is gone, and this one is new."""
        gone = not self._records.begun and self._declared.tracer.thread not in alive()
        return gone and self._lanes.of(here()) is None

    def elsewhere(self, *, ends: bool = False) -> Lane | None:
        """Turns to the step of this thread, if it trains: what happens now is part of that one.

        Args:
            ends: whether what this thread does now ends a step, so that a record can begin.

        Returns:
            The lane of this thread if another one is followed, and stays so.
        """
        if not self._lanes.several:
            return None
        lane = self._lanes.of(here())
        if lane is None:  # it does not train: what it reports is about the one that is followed
            return None
        if lane.saying is not self._scalars.saying:
            self._scalars.turn_to(lane.saying)
        return None if self._turn_to(lane, ends=ends) else lane

    def is_followed(self, losses: Any) -> bool:
        """Whether this thread, which calls `backward` on `losses`, is followed now."""
        followed = self._lanes.followed
        if self._is_alone(followed):
            return True
        if followed.thread == 0:
            followed.thread = self._declared.tracer.thread or here()
            self._losses.follow(followed.thread)
        if not self._takes_part(losses) and self._lanes.of(here()) is None:
            act_for(get_ident())
            self._idle.end()
            self._scalars.turn_to(followed.saying)  # what has happened until now is of that one
            self._scalars.talks = True  # what they say is told apart by where steps end
            self._called.stop()
            self._called.begin_step()
            self._lanes.add(self._new_lane(here()))
            self._announce()
            self._reporter.warn(IN_TURNS)
        return self.elsewhere() is None

    def _is_alone(self, lane: Lane) -> bool:
        """Whether no thread but this one has been seen to train, or is recorded."""
        mine = get_ident()
        if self._lanes.several or lane.helper or not lane.thread == mine == here():
            return False
        traced = self._declared.tracer.thread in (0, mine) or not self._state.armed
        return traced and self._losses.thread == mine

    def _takes_part(self, losses: Any) -> bool:
        """Whether this thread goes on with a step that another one has begun, or has helped with.

        The two do one thing after the other then: they are no threads that train side by side.
        """
        tracer, armed = self._declared.tracer, self._state.armed
        several, lane, traced = self._lanes.several, self._lanes.followed, tracer.thread
        own = self._lanes.of(here())
        if own is not None and (several or not armed or traced in (0, here())):
            self._help(own)
            return True
        if armed and tracer.marks.are_behind(losses):
            if not several:  # the one before is gone, or has called no model
                lane.thread = traced
            elif self._lanes.of(traced) is None:
                return False
            self._help(self._lanes.of(traced) or lane)
            return True
        if several or self._records.begun:
            return False
        threads = alive()
        if lane.helper and (lane.helper == get_ident() or lane.helper not in threads):
            self._help(lane)  # the one that did until now is gone
            return True
        if lane.thread not in threads:
            lane.thread, lane.calls = get_ident(), None
            self._help(lane)
            return True
        return False

    def _help(self, lane: Lane) -> None:
        """Does, from now on, what this thread does for the one that a lane is of."""
        act_for(lane.thread)
        lane.helper = 0 if lane.thread == get_ident() else get_ident()
        if lane is self._lanes.followed:
            self._losses.follow(lane.helper or lane.thread)

    def _turn_to(self, lane: Lane, *, ends: bool = False) -> bool:
        """Follows a thread if no record of another one is in progress; returns whether it is."""
        lanes, tracer, state = self._lanes, self._declared.tracer, self._state
        before = lanes.followed
        if lane is before:
            return True
        traced = tracer.installed and tracer.thread == lane.thread
        waits = state.armed and not (ends and lanes.tired())
        if not traced and (waits or self._records.begun) and not lanes.stale:
            return False
        if tracer.installed and not traced:
            lanes.owed = state.armed
            self._records.drop()
            self._evaluation.close()
            self._hooks.disarm()
        agenda = self._declared.agenda
        before.labels, agenda.labels = agenda.labels, lane.labels
        lanes.followed = lane
        lanes.refused = 0
        if not traced:
            tracer.follow_thread(lane.thread)
            state.forget_calls()
        self._losses.follow(lane.helper or lane.thread)
        return True

    def in_turn(self, plan: Plan, *, keeps: bool) -> Plan:
        """Leaves a record that is due to the thread whose turn it is.

        Args:
            plan: what to do about the step that begins in the thread that is followed.
            keeps: whether all steps are captured.

        Returns:
            What to do about it, taking turns.
        """
        lanes = self._lanes
        if lanes.owed and not keeps:
            plan = Plan.ARM
        if plan is not Plan.ARM:
            return plan
        lanes.owed = lanes.leaves()
        return Plan.WAIT if lanes.owed else plan
