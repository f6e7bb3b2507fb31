"""What ends a training step: sequences of events, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.hooks.step_clock import Seen, StepClock


class Training:
    """Plays events; models and optimizers are letters, and `holds` maps optimizers to models."""

    def __init__(self, holds: dict[str, str], *, rule: str | int = "last_optimizer") -> None:
        self.warnings: list[str] = []
        self.clock = StepClock(rule, warn=self.warnings.append)
        self.holds = holds
        self.called: list[str] = []
        self.stepped: list[str] = []  # in the step in progress
        self.steps: list[str] = []  # the optimizers of each step that has ended

    def play(self, events: Iterable[str], *, seen: bool | Sequence[bool] = True) -> Training:
        """Plays words such as "G D .d": calls to models, and steps of optimizers."""
        for event in events:
            watched = seen if isinstance(seen, bool) else bool(seen[len(self.steps) % len(seen)])
            if event.startswith("."):
                self._step(event[1:], watched=watched)
            elif watched:
                if self.clock.called(ord(event)):
                    self._end()
                self.called.append(event)
        return self

    def _step(self, optimizer: str, *, watched: bool) -> None:
        self.stepped.append(optimizer)
        seen = None
        if watched:
            trained = {
                ord(o): [ord(m) for m in self.called if m in ms] for o, ms in self.holds.items()
            }
            others = {o: ms for o, ms in trained.items() if ms and o != ord(optimizer)}
            aside = not self.holds[optimizer]
            seen = Seen(trained[ord(optimizer)], others, aside)
        if self.clock.stepped(ord(optimizer), seen=seen):
            self._end()

    def _end(self) -> None:
        self.clock.end()
        self.steps.append("".join(self.stepped))
        self.called, self.stepped = [], []


def played(holds: dict[str, str], events: str, *, times: int = 1, **how: bool) -> list[str]:
    return Training(holds).play(events.split() * times, **how).steps


ADVERSARIES = {"d": "D", "g": "G"}
GAN = "G D .d D .g"


def test_one_optimizer_ends_every_step() -> None:
    assert played({"a": "A"}, "A .a", times=5) == ["a"] * 5
    assert played({"a": "A"}, "A A A .a", times=5) == ["a"] * 5


def test_adversaries_are_one_step() -> None:
    assert played(ADVERSARIES, GAN, times=5) == ["dg"] * 5
    assert played(ADVERSARIES, "G D .d " * 5 + "G D .g", times=3) == ["dddddg"] * 3


def test_two_optimizers_of_one_model_are_one_step() -> None:
    assert played({"a": "M", "b": "M"}, "M .a .b", times=5) == ["ab"] * 5
    assert played({"a": "E", "b": "D"}, "E D .a .b", times=5) == ["ab"] * 5


def test_models_one_after_another_have_steps_of_their_own() -> None:
    folds = {name: name.upper() for name in "abc"}
    events = "A .a " * 10 + "B .b " * 10 + "C .c " * 10
    for seen in (True, False):
        assert played(folds, events, seen=seen) == [*"aaaaaaaaaabbbbbbbbbbcccccccccc"]


def test_adversaries_one_after_another() -> None:
    holds = {"d": "D", "g": "G", "e": "E", "h": "H"}
    assert played(holds, "G D .d D .g " * 9 + "H E .e E .h " * 9) == ["dg"] * 9 + ["eh"] * 9


def test_models_side_by_side_that_never_call_each_other() -> None:
    assert played({"a": "A", "b": "B"}, "A .a B .b", times=4) == [*"abababab"]


def test_layers_one_after_another_on_what_is_trained_before() -> None:
    """Greedy training: the first layer is called without gradient while the second is trained."""
    holds = {"a": "A", "b": "B", "c": "C"}
    events = "A .a " * 5 + "A B .b " * 5 + "A B C .c " * 5
    for seen in (True, False):
        assert played(holds, events, seen=seen) == [*"aaaaabbbbbccccc"]


def test_a_network_that_is_called_whole_and_trained_layer_by_layer() -> None:
    holds = {"a": "M", "b": "M", "c": "M"}
    events = ("M .a " * 5 + "M .b " * 5 + "M .c " * 5 + "M").split()
    assert Training(holds).play(events).steps == [*"aaaaabbbbbccccc"]


def test_parts_that_are_trained_in_turns() -> None:
    """As in expectation maximisation."""
    events = ("M .a " * 6 + "M .b " * 6) * 3
    assert played({"a": "M", "b": "M"}, events) == [*("a" * 6 + "b" * 6)] * 3


def test_an_actor_a_critic_and_a_temperature() -> None:
    """The temperature is a number on its own, in no model."""
    holds = {"t": "", "c": "C", "a": "A"}
    assert played(holds, "A .t C T A .c A C .a", times=6) == ["tca"] * 6
    late = played(holds, "A C .c A C .a .t", times=6)
    assert late == ["ca", *["tca"] * 5]


def test_an_actor_that_steps_less_often() -> None:
    assert played({"c": "C", "a": "A"}, "C .c C .c A C .a", times=3) == [*"cca"] * 3


def test_one_pretrained_then_trained_with_its_adversary() -> None:
    steps = played(ADVERSARIES, "G .g " * 12 + GAN + " " + f"{GAN} " * 8)
    assert steps[:12] == ["g"] * 12
    assert steps[12:14] == ["d", "g"]  # only now are they seen to take turns
    assert steps[14:] == ["dg"] * 8


def test_one_that_never_steps_is_not_waited_for_for_ever() -> None:
    steps = played(ADVERSARIES, "G D .d", times=20)
    assert steps == ["d" * 8, *["d"] * 12]


def test_what_is_waited_for_in_vain_ends_whole_rounds() -> None:
    """Two critics and an actor; their target networks have optimizers that never step."""
    holds = {"a": "A", "b": "B", "p": "P", "s": "S", "t": "T"}
    steps = played(holds, "P S T A .a B .b A B P .p", times=12)
    assert steps == ["abp" * 8, *["abp"] * 4]


def test_what_is_not_seen_goes_by_what_was() -> None:
    training = Training(ADVERSARIES).play(GAN.split() * 3)
    training.play(GAN.split() * 10, seen=False)
    assert training.steps == ["dg"] * 13
    assert training.clock.simple is None
    alone = Training({"a": "A"}).play("A .a".split())
    assert alone.clock.simple == ord("a")


def test_a_phase_that_begins_unseen_is_noticed() -> None:
    training = Training({"d": "D", "g": "G", "e": "E"}).play(GAN.split() * 3)
    training.play(("E .e " * 10).split(), seen=False)
    assert training.steps == ["dg"] * 3 + ["e"] * 10
    assert training.clock.unfamiliar
    training.play((".d " * 5).split(), seen=False)  # one of the two alone: more than it ever took
    assert training.steps[13:] == ["dd", "d", "d", "d"]


def test_a_phase_that_begins_unseen_and_is_seen_then_goes_on_alone() -> None:
    training = Training({"a": "A", "b": "B"}).play(("A .a " * 3).split())
    training.play(["A", "B", ".b"], seen=False)
    training.play(("A B .b " * 5).split())
    assert training.steps == [*"aaabbbbbb"]


def test_adversaries_that_begin_unseen_take_turns_after_one_round() -> None:
    holds = {"a": "A", "d": "D", "g": "G"}
    training = Training(holds).play(("A .a " * 3).split())
    training.play(["G", "D", ".d"], seen=False)
    training.play(("D .g " + f"{GAN} " * 5).split())
    assert training.steps == [*"aaadg", *["dg"] * 5]


def said(training: Training) -> str:
    (warning,) = training.warnings
    return warning


@given(critic=st.integers(1, 7), pretrained=st.sampled_from(["", "G .g", "D .d"]))
def test_adversaries_of_any_rhythm_are_one_step_per_round_or_that_is_said(
    critic: int, pretrained: str
) -> None:
    once = "G D .d " * critic + "G D .g "
    training = Training(ADVERSARIES).play(f"{pretrained} ".split() * 3)
    training.play((once * 5).split())
    steps, whole = training.steps[3 * bool(pretrained) :], "d" * critic + "g"
    if pretrained != "G .g":
        assert (steps, training.warnings) == ([whole] * 5, [])
    else:  # until then, it has ended its steps alone
        assert steps == [*whole, *[whole] * 4]
        assert f"step numbers are at least {critic} higher" in said(training)


@given(critic=st.integers(1, 7), seen_from=st.integers(1, 7))
def test_a_first_round_that_is_not_seen_counts_more_often_and_that_is_said(
    critic: int, seen_from: int
) -> None:
    events = ("G D .d " * critic + "G D .g").split()
    training = Training(ADVERSARIES).play(events[: 3 * seen_from], seen=False)
    training.play(events[3 * seen_from :])
    training.play(events * 4)
    whole = "d" * critic + "g"
    assert training.steps[-4:] == [whole] * 4
    higher = len(training.steps) - 5
    assert f"step numbers are at least {higher} higher" in said(training)


def test_what_is_trained_apart_is_not_said_to_take_turns() -> None:
    layers = {"a": "A", "b": "B", "c": "C"}
    for holds, events in (
        (layers, "A .a " * 5 + "A B .b " * 5 + "A B C .c " * 5),
        ({"c": "C", "a": "A"}, "C .c C .c A C .a " * 5),
        ({"a": "M", "b": "M"}, "M .a M .a M .b M .b " * 5),
        ({"t": "", "c": "C", "a": "A"}, "A C .c A C .a .t " * 5),
        (ADVERSARIES, f"{GAN} " * 5),
    ):
        for seen in (True, False):
            assert Training(holds).play(events.split(), seen=seen).warnings == []


def test_one_that_steps_too_often_to_be_waited_with_is_said() -> None:
    training = Training(ADVERSARIES).play(("G D .d " * 8 + "G D .g ").split() * 3)
    assert "another one stepped 8 times in the meantime" in training.warnings[0]


# -- other rules ----------------------------------------------------------------------------------


def test_any_optimizer_a_certain_one_or_the_programs_word() -> None:
    events = (("G D .d " * 3 + "G D .g ") * 2).split()
    steps = {rule: Training(ADVERSARIES, rule=rule).play(events).steps for rule in ("any", 1, 0)}
    assert steps == {"any": [*"dddgdddg"], 1: ["dddg"] * 2, 0: ["d", "d", "d", "gd", "d", "d"]}
    clock = StepClock("Adam", warn=lambda _: None)
    assert [clock.stepped(1, classes=["Adam", "Optimizer"]), clock.stepped(2)] == [True, False]
    explicit = StepClock("explicit", warn=lambda _: None)
    assert not explicit.stepped(1)
    assert explicit.by_program()


def test_a_rule_that_ends_nothing_is_said_once() -> None:
    training = Training(ADVERSARIES, rule="Adam").play(("G D .d " * 250).split())
    (warning,) = training.warnings
    assert warning.startswith(
        "schedule.step: 'Adam' has not ended any step in the last 100 optimizer steps; "
    )


@pytest.mark.parametrize(
    ("rule", "stepped"), [("Adm", "SGD, Adam; did you mean 'Adam'?"), (7, "0 SGD, 1 Adam")]
)
def test_a_rule_that_names_no_optimizer_names_those_there_are(
    rule: str | int, stepped: str
) -> None:
    warnings: list[str] = []
    clock = StepClock(rule, warn=warnings.append)
    before = clock.in_vain
    assert before is None, "nothing has stepped yet"
    for _ in range(3):
        assert not clock.stepped(1, classes=["SGD", "Optimizer"])
        assert not clock.stepped(2, classes=["Adam", "Optimizer"])
    assert clock.in_vain == (
        f"schedule.step: {rule!r} has not ended any step; the optimizers that stepped are {stepped}"
    )
    assert not warnings
    met = StepClock("SGD", warn=warnings.append)
    met.stepped(1, classes=["SGD", "Optimizer"])
    met.stepped(2, classes=["Adam", "Optimizer"])
    assert met.in_vain is None


# -- whatever happens -----------------------------------------------------------------------------

MODELS, OPTIMIZERS = "ABCD", "abcd"
events = st.lists(st.sampled_from([*MODELS, *(f".{o}" for o in OPTIMIZERS)]), max_size=80)
holdings = st.fixed_dictionaries({o: st.text(MODELS, max_size=3) for o in OPTIMIZERS})


@given(holds=holdings, events=events, seen=st.lists(st.booleans(), min_size=1, max_size=5))
def test_steps_are_made_of_all_that_stepped_in_order(
    holds: dict[str, str], events: list[str], seen: list[bool]
) -> None:
    training = Training(holds).play(events, seen=seen)
    taken = "".join(training.steps) + "".join(training.stepped)
    assert taken == "".join(event[1:] for event in events if event.startswith("."))


@given(holds=holdings, events=events, seen=st.lists(st.booleans(), min_size=1, max_size=5))
def test_no_optimizer_steps_more_than_eight_times_in_a_step(
    holds: dict[str, str], events: list[str], seen: list[bool]
) -> None:
    training = Training(holds).play(events, seen=seen)
    for step in (*training.steps, "".join(training.stepped)):
        assert max((step.count(o) for o in OPTIMIZERS), default=0) <= 8 + (len(set(seen)) > 1)


@given(
    order=st.permutations([*OPTIMIZERS]),
    repeats=st.lists(st.integers(1, 6), min_size=4, max_size=4),
    cycles=st.integers(2, 6),
    seen=st.integers(1, 3),
)
def test_a_regular_training_is_regular_from_its_first_step(
    order: list[str], repeats: list[int], cycles: int, seen: int
) -> None:
    """All models are called in each step; after a few observed steps, the rest are not observed."""
    once = " ".join(f"{MODELS} .{o} " * n for o, n in zip(order, repeats, strict=True))
    words = once.replace(MODELS, " ".join(MODELS)).split()
    training = Training({o: o.upper() for o in OPTIMIZERS})
    training.play(words * seen)
    training.play(words * cycles, seen=False)
    assert len(training.steps) == seen + cycles
    assert all(set(step) == set(OPTIMIZERS) for step in training.steps)
    if repeats[-1] == 1:  # otherwise the steps of `abb` end at the first `b`
        assert all(a == b for a, b in pairwise(training.steps))


@given(counts=st.lists(st.integers(1, 12), min_size=1, max_size=4), seen=st.booleans())
def test_trainings_one_after_another_have_as_many_steps_as_their_optimizers(
    counts: list[int], seen: bool
) -> None:
    names = OPTIMIZERS[: len(counts)]
    events = [w for o, n in zip(names, counts, strict=True) for w in [o.upper(), f".{o}"] * n]
    training = Training({o: o.upper() for o in OPTIMIZERS}).play(events, seen=seen)
    assert training.steps == [o for o, n in zip(names, counts, strict=True) for _ in range(n)]
