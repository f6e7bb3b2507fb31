"""Concurrent training threads. Each has its own steps, and one thread is recorded at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from comgra_decl.hooks.call_context import is_called_by_module
from comgra_decl.hooks.cross_thread import act_for, here
from comgra_decl.hooks.other_threads import alive, this_thread
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
"""The number of steps for which a thread leaves a record to the thread whose turn it is."""

_STALE = 1000
"""The number of steps of other threads after which an unfinished record is dropped."""

IN_TURNS = (
    "multiple threads train. Steps are numbered in the order in which they end, across threads; "
    "one step is recorded at a time, and the threads take turns"
)


@dataclass(eq=False)
class Lane:
    """The state of one training thread.

    Attributes:
        thread: the identifier of the thread; 0 while none has trained.
        clock: determines which optimizer step ends its training steps.
        hand: detects the end of its steps after manual updates.
        saying: the metrics and notes of its step in progress.
        labels: the labels of that step.
        record: the number of its last recorded step; -1 if there is none.
        waited: the number of its steps since it began to leave a record to another thread.
        waits: whether other threads still leave a record to this thread; False once they have done
        so in vain.
        calls: whether it has called a model; None if it was not observed.
        helper: another thread that calls `backward` for it; 0 if there is none.
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
    """The training threads, and the one that is followed.

    Args:
        first: the lane of the first thread that trains.

    Attributes:
        several: whether more than one thread trains.
        followed: the lane of the thread whose step is recorded, or which was active last.
        owed: whether a record is due that the followed thread did not begin.
        passed: the number of steps of other threads that ended during the followed one's step.
        refused: how often another thread could have begun the record that the followed thread has
            not begun.
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
        """Return the lane of a thread; None if it has not been observed to train."""
        return next((lane for lane in self._all if lane.thread == thread), None)

    def is_beside(self, thread: int) -> bool:
        """Return whether a thread trains but is not the followed one."""
        lane = self.of(thread)
        return lane is not None and lane is not self.followed

    def add(self, lane: Lane) -> None:
        """Add the lane of another training thread."""
        self._all.append(lane)
        self.several = True

    def prune(self) -> list[Lane]:
        """Remove and return the lanes of threads that have ended."""
        threads = alive()
        gone = [x for x in self._all if x is not self.followed and x.thread not in threads]
        self._all = [lane for lane in self._all if lane not in gone]
        self.several = len(self._all) > 1
        return gone

    @property
    def stale(self) -> bool:
        """Whether to abandon an unfinished record of the followed thread."""
        gone = self.followed.thread not in alive()
        return gone or self.passed >= _STALE

    def tired(self) -> bool:
        """Count a refusal; return whether the other thread may now take over the due record.

        Called when a step of another thread ends and the followed one has not begun the record.
        """
        self.refused += 1
        return self.refused > _PATIENCE * len(self._all)

    def leaves(self) -> bool:
        """Return whether the followed thread leaves the due record to the next one in turn."""
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
    """Decides which training thread is followed, so that the threads take turns with the record.

    Args:
        lanes: the training threads.
        new_lane: creates the lane of a new thread.
        declared: the components that depend on the spec.
        state: the state of the followed thread's step in progress.
        records: drops records.
        hooks: installs and removes the hooks of a record.
        evaluation: the evaluation phases and their record.
        losses: observes `backward`.
        scalars: receives the metrics of steps.
        idle: counts the steps that need no other work.
        called: the models called in the step in progress.
        reporter: receives warnings.
        announce: called when another thread first trains.
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
        """The step clock of the followed thread."""
        return self._lanes.followed.clock

    @property
    def hand(self) -> HandUpdates:
        """The detector of manual updates in the followed thread."""
        return self._lanes.followed.hand

    def thread_to_follow(self) -> int:
        """Return the thread that a beginning record follows; 0 for the first that calls a model."""
        lane = self._lanes.followed
        if self._lanes.several or (lane.calls and not self._is_in_call()):
            return lane.thread
        if lane.calls:
            return here()
        if lane.calls is None and lane.thread in (0, here()):
            return here() if self._state.number else 0  # armed at the end of the previous step
        return 0

    def _is_in_call(self) -> bool:
        """Return whether this thread is within a module call."""
        tracer = self._declared.tracer
        if tracer.installed:  # nearly always: walking up the stack creates objects for its frames
            return tracer.inside
        return is_called_by_module(sys._getframe(1))

    def turn_here(self) -> bool:
        """Follow the current thread if it is one of several and no record prevents this.

        Returns:
            Whether the current thread is followed now.
        """
        lane = self._lanes.of(here()) if self._lanes.several else None
        return lane is not None and self._turn_to(lane)

    def abandoned(self) -> bool:
        """Return whether this thread is new and the thread to record next has ended."""
        gone = not self._records.begun and self._declared.tracer.thread not in alive()
        return gone and self._lanes.of(here()) is None

    def elsewhere(self, *, ends: bool = False) -> Lane | None:
        """Switch to the step of the current thread, if it trains, to handle an event in it.

        Args:
            ends: whether the event ends a step, so that a record can begin.

        Returns:
            The lane of the current thread if another thread remains followed, else None.
        """
        if not self._lanes.several:
            return None
        lane = self._lanes.of(here())
        if lane is None:  # it does not train, so the event belongs to the followed thread
            return None
        if lane.saying is not self._scalars.saying:
            self._scalars.turn_to(lane.saying)
        return None if self._turn_to(lane, ends=ends) else lane

    def is_followed(self, losses: Any) -> bool:
        """Return whether the current thread is followed when it calls `backward` on `losses`."""
        followed = self._lanes.followed
        if self._is_alone(followed):
            return True
        if followed.thread == 0:
            followed.thread = self._declared.tracer.thread or here()
            self._losses.follow(followed.thread)
        if not self._takes_part(losses) and self._lanes.of(here()) is None:
            act_for(this_thread.number)
            self._idle.end()
            self._scalars.turn_to(followed.saying)  # earlier events belong to that thread
            self._scalars.talks = True  # their events can only be separated at the ends of steps
            self._called.stop()
            self._called.begin_step()
            self._lanes.add(self._new_lane(here()))
            self._announce()
            self._reporter.warn(IN_TURNS)
        return self.elsewhere() is None

    def _is_alone(self, lane: Lane) -> bool:
        """Return whether the current thread is recorded or is the only one known to train."""
        mine = this_thread.number
        if self._lanes.several or lane.helper or not lane.thread == mine == here():
            return False
        traced = self._declared.tracer.thread in (0, mine) or not self._state.armed
        return traced and self._losses.thread == mine

    def _takes_part(self, losses: Any) -> bool:
        """Return whether this thread continues or helps with a step that another thread began.

        The two threads then work on one step in sequence rather than train concurrently.
        """
        tracer, armed = self._declared.tracer, self._state.armed
        several, lane, traced = self._lanes.several, self._lanes.followed, tracer.thread
        own = self._lanes.of(here())
        if own is not None and (several or not armed or traced in (0, here())):
            self._help(own)
            return True
        if armed and tracer.marks.are_behind(losses):
            if not several:  # the previous thread has ended, or has called no model
                lane.thread = traced
            elif self._lanes.of(traced) is None:
                return False
            self._help(self._lanes.of(traced) or lane)
            return True
        if several or self._records.begun:
            return False
        threads = alive()
        if lane.helper and (lane.helper == this_thread.number or lane.helper not in threads):
            self._help(lane)  # the previous helper has ended, or is this thread
            return True
        if lane.thread not in threads:
            lane.thread, lane.calls = this_thread.number, None
            self._help(lane)
            return True
        return False

    def _help(self, lane: Lane) -> None:
        """Make the current thread act for the thread of a lane from now on."""
        act_for(lane.thread)
        lane.helper = 0 if lane.thread == this_thread.number else this_thread.number
        if lane is self._lanes.followed:
            self._losses.follow(lane.helper or lane.thread)

    def _turn_to(self, lane: Lane, *, ends: bool = False) -> bool:
        """Follow a thread unless another is being recorded; return whether it is followed."""
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
        """Adjust a plan so that a due record goes to the thread that is next in turn.

        Args:
            plan: the plan for the step that begins in the followed thread.
            keeps: whether all steps are captured.

        Returns:
            The adjusted plan.
        """
        lanes = self._lanes
        if lanes.owed and not keeps:
            plan = Plan.ARM
        if plan is not Plan.ARM:
            return plan
        lanes.owed = lanes.leaves()
        return Plan.WAIT if lanes.owed else plan
