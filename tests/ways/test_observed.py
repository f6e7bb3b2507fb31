"""Compiled programs whose recorded steps stay compiled: `compile: observed`.

The expected values are those of the same program uncompiled, read with plain torch hooks. The
backends here leave the arithmetic unchanged, so no bit may differ.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import comgra_decl as comgra
from comgra_decl.hooks.schedule.budget import Budget
from tests.support.recording import Recording, contents, recording
from tests.support.shortened import combined, shortened
from tests.ways.models import batches
from tests.ways.proof import FULL, Outcome, Told, attached, outcome, same, seeded, verify
from tests.ways.test_compiled import WAYS, Block, Graphs, model

# torch's own imports for compiling raise warnings
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="two variants cannot be kept apart"),
]

FEW_WAYS = pytest.mark.parametrize(
    "way", shortened(["blocks", "whole", "fullgraph", "in place", "wrapped"], tried=1)
)
STEPS = 7
RECORDED = [0, 2, 4, 6]
SPEC = {
    **FULL,
    "compile": "observed",
    "graph": False,
    "schedule": {"first": 1, "every": 2},
}
Make = Callable[[], nn.Module]
Step = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def compiled(net: Any, backend: Any = "aot_eager", **arguments: Any) -> Any:
    return torch.compile(net, backend=backend, **arguments)


def uncompiled(net: nn.Module) -> Any:
    return net


def cross_entropy(called: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(called(x), y)
    loss.backward()
    return loss


@dataclass
class Training:
    """One program, which may be compiled; `sizes` are those of its batches in turn."""

    make: Make
    step: Step = cross_entropy
    sizes: tuple[int, ...] = (8,)
    steps: int = STEPS

    def __call__(self, told: Told, compile_it: Callable[[nn.Module], Any]) -> Outcome:
        net = self.make()
        called = compile_it(net)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        losses = []
        for number in range(self.steps):
            told.modules(net, *(name for name, _ in net.named_modules() if name))
            ((x, y),) = batches(1, size=self.sizes[number % len(self.sizes)])
            optimizer.zero_grad()
            losses.append(self.step(called, x, y).item())
            told.parameters(net)
            optimizer.step()
            told.end()
        return outcome(losses, net, optimizers=[optimizer])


def proven(
    training: Training,
    compile_it: Any = compiled,
    *,
    recorded: Sequence[int] = RECORDED,
    **changes: Any,
) -> Recording:
    """Asserts that recording changes no bit and that the records are correct."""
    told = Told(listening=True)
    truth = seeded(partial(training, compile_it=uncompiled), told)
    plain = seeded(partial(training, compile_it=compile_it), Told(listening=False))
    before = attached()
    torch.compiler.reset()
    with recording({**SPEC, **changes}) as traced:
        found = seeded(partial(training, compile_it=compile_it), Told(listening=False))
    assert traced.faults == []
    assert attached() == before
    same(plain, found)
    assert [step.info.step for step in traced.steps] == list(recorded)
    assert truth.losses == plain.losses, "the backend computes otherwise: there is no truth"
    told.values = {key: value for key, value in told.values.items() if key[0] in recorded}
    verify(traced, told)
    return traced


@FEW_WAYS
def test_observed_steps_of_compiled_code_change_nothing_and_are_true(
    way: str, shown: list[tuple[str, str]]
) -> None:
    traced = proven(Training(model), lambda net: WAYS_OF_NET[way](net))
    assert traced.report["warnings"] == []
    assert {"0.one", "1.two"} <= {node for node, _ in shown}
    assert ("", "gradient") in shown


def _blocks(net: nn.Module, *, wrapped: bool) -> nn.Module:
    assert isinstance(net, nn.Sequential)
    for number in (0, 1):
        if wrapped:
            net[number] = compiled(net[number])
        else:
            net[number].compile(backend="aot_eager")
    return net


def _in_place(net: nn.Module) -> nn.Module:
    net.compile(backend="aot_eager")
    return net


WAYS_OF_NET: dict[str, Callable[[nn.Module], Any]] = {
    "whole": compiled,
    "fullgraph": partial(compiled, fullgraph=True),
    "in place": _in_place,
    "blocks": partial(_blocks, wrapped=False),
    "wrapped": partial(_blocks, wrapped=True),
}
assert WAYS_OF_NET.keys() == WAYS.keys()


def graphs() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return {**counters["stats"], **counters["frames"], **counters["recompiles"]}


@FEW_WAYS
def test_observed_steps_leave_what_is_compiled_for_all_others_as_it_is(way: str) -> None:
    """A backend that counts: the plain variant once, the other one once, when it is needed."""
    counting, plain_counting = Graphs(), Graphs()
    by_step: list[int] = []
    counts: list[dict[str, int]] = []

    def step(called: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(called, x, y)
        by_step.append(counting.compiled)
        counts.append(graphs())
        return loss

    seeded(
        lambda told: Training(model)(told, lambda net: _with(way, net, plain_counting)),
        Told(listening=False),
    )
    torch.compiler.reset()
    with recording(SPEC) as traced:
        seeded(
            lambda told: Training(model, step)(told, lambda net: _with(way, net, counting)),
            Told(listening=False),
        )
    assert traced.faults == []
    once = plain_counting.compiled
    assert by_step == [0, once, 2 * once, 2 * once, 2 * once, 2 * once, 2 * once]
    assert counts[2] == counts[-1], "the compiler has looked at something again"


@pytest.mark.slow
def test_observed_steps_take_up_none_of_the_recompilations_that_a_program_may_have(
    shown: list[tuple[str, str]],
) -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        traced = proven(Training(model))
    assert traced.report["warnings"] == []
    assert shown


@pytest.mark.slow
def test_sizes_of_observed_batches_are_no_news_for_all_other_steps() -> None:
    """The first three steps are recorded; plain code for changing sizes needs to run as well."""
    dynamic: list[bool] = []

    def looking(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        observed = any("comgra_decl" in str(node.target) for node in graph.graph.nodes)
        if not observed:
            dynamic.append(any(isinstance(given, torch.SymInt) for given in inputs))
        return graph.forward

    def seen(sizes: tuple[int, ...]) -> list[bool]:
        torch.compiler.reset()
        dynamic.clear()
        with recording({**SPEC, "schedule": {"first": 3, "every": 100}}) as traced:
            training = Training(model, sizes=sizes)
            seeded(lambda t: training(t, lambda net: compiled(net, looking)), Told(listening=False))
        assert traced.faults == []
        return [*dynamic]

    assert seen((8, 5, 7, 8, 8, 8, 8)) == [False]
    assert seen((8, 8, 8, 8, 5, 7, 8)) == [False, True]


@pytest.mark.slow
def test_a_budget_is_not_charged_with_compiling_while_observed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a minute of it would prevent records for half an hour."""
    once: list[float] = []
    ended = Budget.step_ended

    def noting(self: Budget, *args: Any, **kwargs: Any) -> None:
        once.append(kwargs["once"])
        ended(self, *args, **kwargs)

    monkeypatch.setattr(Budget, "step_ended", noting)
    began = time.perf_counter()
    proven(Training(model))
    assert [seconds > 0 for seconds in once] == [step == 2 for step in range(STEPS)]
    assert sum(once) < time.perf_counter() - began


def _with(way: str, net: nn.Module, backend: Any) -> Any:
    if way == "whole":
        return compiled(net, backend)
    if way == "fullgraph":
        return compiled(net, backend, fullgraph=True)
    if way == "in place":
        net.compile(backend=backend)
        return net
    assert isinstance(net, nn.Sequential)
    for number in (0, 1):
        if way == "wrapped":
            net[number] = compiled(net[number], backend)
        else:
            net[number].compile(backend=backend)
    return net


class Broken(nn.Module):
    """Cannot be compiled in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = Block(6), Block(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x)
        torch._dynamo.graph_break()
        result: torch.Tensor = self.last(self.two(hidden))
        return result


class Changed(nn.Module):
    """Outputs that are changed in place, views of each other, and inputs that are passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = nn.Identity()
        self.one = nn.Linear(6, 8)
        self.relu = nn.ReLU(inplace=True)
        self.flat = nn.Flatten()
        self.two = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(self.keep(x))
        hidden += 1
        hidden = self.relu(hidden)
        hidden = self.flat(hidden.view(-1, 2, 4))
        result: torch.Tensor = self.two(hidden)
        result *= 2
        return result


class Looped(nn.Module):
    """Calls a layer three times, once of them without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.again = nn.Linear(8, 8)
        self.aside = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for _ in range(3):
            hidden = torch.tanh(self.again(hidden))
        with torch.no_grad():
            shift = self.aside(hidden)
        result: torch.Tensor = self.last(hidden + shift)
        return result


class Idle(nn.Module):
    """A dropout that drops nothing returns its input, so both have the same gradient."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(6, 8), dropout.eval(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x)[:, :, None, None, None]
        dropped = self.drop(hidden) * 2 + hidden
        result: torch.Tensor = self.two(dropped.flatten(1))
        return result


@pytest.mark.parametrize(
    "dropout",
    shortened([nn.Dropout3d, nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout], tried=1),
)
def test_gradients_of_a_dropout_that_drops_nothing_are_those_of_what_it_returns(
    dropout: type[nn.Module],
) -> None:
    traced = proven(Training(lambda: Idle(dropout())))
    assert traced.report["warnings"] == []


@pytest.mark.parametrize("make", shortened([Broken, Changed, Looped], tried=1))
def test_observed_modules_may_do_what_modules_do(make: Make, shown: list[tuple[str, str]]) -> None:
    traced = proven(Training(make))
    assert traced.report["warnings"] == []
    assert shown


@pytest.mark.slow
def test_observed_batches_may_change_their_size(shown: list[tuple[str, str]]) -> None:
    proven(Training(model, sizes=(8, 8, 5, 5, 7, 8, 3)))
    assert shown


def test_observed_micro_batches_are_told_apart_in_backward(shown: list[tuple[str, str]]) -> None:
    """Two calls to the same compiled code, whose gradients arrive in the opposite order."""

    def step(called: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = [F.cross_entropy(called(part), y[:4]) for part in (x[:4], x[4:])]
        for loss in reversed(losses):
            loss.backward()
        return losses[0] + losses[1]

    proven(Training(model, step))
    assert shown


@pytest.mark.parametrize(
    ("make", "node"), [(model, "0.one"), pytest.param(Looped, "first", marks=pytest.mark.slow)]
)
def test_observed_steps_may_follow_each_other(
    make: Make, node: str, shown: list[tuple[str, str]]
) -> None:
    proven(Training(make), recorded=range(STEPS), schedule={"first": STEPS})
    assert len([1 for seen in shown if seen == (node, "output")]) == STEPS - 1


class Pair(NamedTuple):
    """Two tensors."""

    left: torch.Tensor
    right: torch.Tensor


class Gives(nn.Module):
    """Returns several tensors in its own output type."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.one = nn.Linear(6, 8)
        self.two = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> Any:
        one, two = self.one(x), self.two(x)
        if self.form == "tuple":
            return one, [two, one + two]
        if self.form == "dict":
            return {"one": one, "rest": (two,)}
        return Pair(one, two)


class Taken(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.gives = Gives(form)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        got = self.gives(x)
        if isinstance(got, dict):
            hidden = got["one"] + got["rest"][0]
        else:
            second = got[1]
            hidden = got[0] + (second[0] * second[1] if isinstance(second, list) else second)
        result: torch.Tensor = self.last(hidden)
        return result


@pytest.mark.parametrize("form", shortened(["named tuple", "tuple", "dict"], tried=1))
def test_observed_outputs_of_several_tensors_have_the_names_that_they_have_eagerly(
    form: str, shown: list[tuple[str, str]]
) -> None:
    def training(called: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(called, x, y)

    records = {}
    for how in ("eager", "observed"):
        torch.compiler.reset()
        with recording({**SPEC, "compile": how}) as traced:
            seeded(
                lambda told: Training(partial(Taken, form), training)(told, compiled),
                Told(listening=False),
            )
        assert traced.faults == []
        assert traced.report["warnings"] == []
        records[how] = [(list(s.layout.slots), s.values, traced.slots) for s in traced.steps]
    assert shown
    for eager, observed in zip(records["eager"], records["observed"], strict=True):
        assert sorted(eager[0]) == sorted(observed[0])
        for slot, value in eager[1].items():
            assert (value == observed[1][slot]).all()


# -- where it is not possible
# ----------------------------------------------------------------------


def only_warning(traced: Recording) -> str:
    (said,) = traced.report["warnings"]
    return str(said)


@pytest.mark.slow
def test_an_observed_session_may_begin_when_all_is_compiled(shown: list[tuple[str, str]]) -> None:
    net = model()
    called = compiled(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = graphs()
    for session in range(3):
        with recording(SPEC if session else {**SPEC, "compile": "eager"}) as traced:
            for x, y in batches(3):
                cross_entropy(called, x, y)
                optimizer.step()
        assert traced.faults == []
        assert bool(shown) == bool(session)
        shown.clear()
    assert graphs() != before


class Named(nn.Module):
    """Names a tensor within compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.two(comgra.node(torch.tanh(self.one(x)), "hidden"))
        return result


@pytest.mark.parametrize(
    ("reason", "how"),
    combined(
        [
            (Named, {}, "names tensors with comgra.node, 'hidden' for example"),
            (
                model,
                {"nodes": {**FULL["nodes"], "tanh": {"select": {"function": "torch.tanh"}}}},
                "the spec selects function calls",
            ),
        ],
        ["observed", "auto"],
        rounds=1,
    ),
    ids=["named", "named, auto", "functions", "functions, auto"],
)
def test_what_cannot_be_observed_runs_eagerly_and_says_why(
    reason: tuple[Make, dict[str, Any], str], how: str, shown: list[tuple[str, str]]
) -> None:
    make, changes, why = reason
    traced = proven(Training(make), **changes, compile=how)
    assert why in only_warning(traced)
    assert shown == []


@pytest.mark.parametrize("how", shortened(["auto", "observed"], tried=1))
def test_a_torch_that_lacks_what_observers_need_runs_recorded_steps_eagerly(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "comgra_decl.hooks.compiled.variant", raising=False)
    monkeypatch.delattr("comgra_decl.hooks.compiled.variant", raising=False)
    monkeypatch.setitem(sys.modules, "comgra_decl.hooks.compiled.variant", None)
    traced = proven(Training(model), compiled, compile=how)
    assert f"torch {torch.__version__} lacks required features" in only_warning(traced)


class Refusing:
    """A backend that compiles no graph in which it is shown anything."""

    def __init__(self) -> None:
        self.refused = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        if any("comgra_decl" in str(node.target) for node in graph.graph.nodes):
            self.refused += 1
            raise RuntimeError("not this one")
        return graph.forward


@FEW_WAYS
def test_code_that_cannot_be_compiled_while_observed_runs_eagerly_and_says_why(way: str) -> None:
    backend = Refusing()
    traced = proven(Training(model), lambda net: _with(way, net, backend), compile="auto")
    assert "not this one" in only_warning(traced)
    assert backend.refused == 1


class Alternating(nn.Module):
    """Occasionally skips a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.one(x))
        if x.shape[0] == 8:
            hidden = self.two(hidden)
        result: torch.Tensor = self.last(hidden)
        return result


@pytest.mark.parametrize("mode", shortened(["auto", "observed"], tried=1))
@pytest.mark.slow
def test_what_a_program_leaves_out_of_a_step_is_no_omission_of_compiled_code(
    mode: str, shown: list[tuple[str, str]]
) -> None:
    training = Training(Alternating, sizes=(8, 8, 5, 5))
    assert proven(training, compile=mode).report["warnings"] == []
    assert {node for node, what in shown if what == "output"} == {"one", "two", "last"}


class Lending(Alternating):
    """Lends the weight of the skipped layer, which therefore still has a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0 * self.two.weight.sum()


def counting(shown: list[tuple[str, str]], step: Step) -> tuple[Step, list[int]]:
    """Returns a step that counts what compiled code has shown in it, and the counts."""
    counts: list[int] = []

    def counted(called: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shown.clear()
        loss = step(called, x, y)
        counts.append(len(shown))
        return loss

    return counted, counts


@pytest.mark.parametrize(
    ("sizes", "last"),
    [
        ((8, 8, 5, 5), "eager"),
        pytest.param((8, 8, 5, 5, 5, 5, 5), "observed", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_what_observed_code_does_not_show_is_said_and_auto_looks_for_it_eagerly(
    sizes: tuple[int, ...], last: str, shown: list[tuple[str, str]]
) -> None:
    step, counts = counting(shown, cross_entropy)
    traced = proven(Training(Lending, step, sizes=sizes), compile="auto")
    said = traced.report["warnings"]
    assert "two" in said[0]
    assert "Step 2 is recorded without" in said[0]
    assert "The next recorded step runs eagerly" in said[0]
    observed = [count > 0 for count in counts[-STEPS:]][::2]
    assert observed == [False, True, False, last == "observed"]
    assert ["the eager step after it was complete" in line for line in said[1:]] == (
        [True] if last == "eager" else []
    )


@pytest.mark.slow
def test_observed_stays_observed_whatever_compiled_code_does_not_show(
    shown: list[tuple[str, str]],
) -> None:
    step, counts = counting(shown, cross_entropy)
    traced = proven(Training(Lending, step, sizes=(8, 8, 5, 5)), compile="observed")
    assert "compile: auto, recorded steps would run eagerly" in only_warning(traced)
    assert [count > 0 for count in counts[-STEPS:]][::2] == [False, True, True, True]


@pytest.mark.slow
def test_a_gradient_is_recorded_before_the_programs_own_hook_changes_it() -> None:
    def halving(called: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = called(x)
        out.register_hook(lambda gradient: gradient * 0.5)
        loss = F.cross_entropy(out, y)
        loss.backward()
        return loss

    assert proven(Training(model, halving)).report["warnings"] == []


class Freezing(nn.Module):
    """Freezes its first layer after a few calls."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.last = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.act(self.one(x)))
        return result


@pytest.mark.parametrize("mode", shortened(["auto", "observed"], tried=1))
@pytest.mark.slow
def test_a_layer_that_is_frozen_makes_the_next_record_eager(
    mode: str, shown: list[tuple[str, str]]
) -> None:
    frozen: list[nn.Module] = []

    def make() -> nn.Module:
        frozen[:] = [net := Freezing()]
        calls.clear()
        return net

    def freeze(called: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            frozen[0].one.requires_grad_(False)
        return cross_entropy(called, x, y)

    calls: list[int] = []
    step, counts = counting(shown, freeze)
    traced = proven(Training(make, step), compile=mode)
    assert traced.report["warnings"] == []
    assert [count > 0 for count in counts[-STEPS:]][::2] == [False, True, False, True]


@pytest.mark.parametrize("kept", shortened([True, False], tried=1))
def test_a_model_after_another_is_no_omission_of_compiled_code(kept: bool) -> None:
    models = []
    with recording({**SPEC, "compile": "auto", "schedule": {"first": 8}}) as traced:
        for _ in range(2):
            net = Freezing()
            if kept:
                models.append(net)
            called, optimizer = compiled(net), torch.optim.SGD(net.parameters(), 0.1)
            for x, y in batches(4):
                optimizer.zero_grad()
                F.cross_entropy(called(x), y).backward()
                optimizer.step()
    assert not any("does not expose" in line for line in traced.report["warnings"])
    assert len({len(step.values) for step in traced.steps}) == 1


def test_updates_that_a_scaler_skips_are_no_omission_of_compiled_code() -> None:
    net = Freezing()
    called, optimizer = compiled(net), torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with recording({**SPEC, "compile": "auto"}) as traced:
        for number, (x, y) in enumerate(batches(STEPS)):
            optimizer.zero_grad()
            scale = 1e38 if number == 2 else 1.0
            scaler.scale(F.cross_entropy(called(x), y) * scale * scale).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not any("does not expose" in line for line in traced.report["warnings"])


@pytest.mark.slow
def test_steps_whose_graph_is_followed_run_eagerly(shown: list[tuple[str, str]]) -> None:
    """The first two, and every tenth record."""
    step, counts = counting(shown, cross_entropy)
    traced = proven(Training(model, step), graph=True)
    assert [count > 0 for count in counts[-STEPS:]] == [False] * 4 + [True, False, True]
    assert ("1.two", "1") in traced.edges()


def test_a_program_that_has_a_stance_keeps_it_in_observed_steps(
    shown: list[tuple[str, str]],
) -> None:
    with torch.compiler.set_stance("force_eager"):
        proven(Training(model))
    assert shown == []


class Checkpointed(nn.Module):
    """Recomputes a block in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.block, self.last = nn.Linear(6, 8), Block(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x)
        if torch.compiler.is_compiling():  # otherwise hooks would run in backward, too
            hidden = checkpoint(self.block, hidden, use_reentrant=False)
        else:
            hidden = self.block(hidden)
        result: torch.Tensor = self.last(hidden)
        return result


class Outermost(nn.Module):
    """Recomputes all of it: the input has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            return self.layer(x)
        result: torch.Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return result


class Around(nn.Module):
    """Recomputes something, in eager code, that is compiled."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.one, self.block, self.last = nn.Linear(6, 8), Block(8), nn.Linear(8, 3)
        self.called: list[Callable[..., torch.Tensor]] = [self.block]
        if what == "a block":
            self.block.compile(backend="aot_eager")
        elif what == "a wrapped block":
            self.called = [compiled(self.block)]
        else:
            self.called = [compiled(self.twice)]

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x)
        hidden = checkpoint(self.called[0], hidden, use_reentrant=False) + hidden
        result: torch.Tensor = self.last(hidden)
        return result


@pytest.mark.slow
@pytest.mark.parametrize("what", shortened(["a block", "a function", "a wrapped block"], tried=1))
def test_compiled_code_that_an_eager_checkpoint_calls_again_is_observed(
    what: str, shown: list[tuple[str, str]]
) -> None:
    """The recomputation must run the same code, because autograd compares what both have saved."""
    training = partial(Training(partial(Around, what)), compile_it=uncompiled)
    plain = seeded(training, Told(listening=False))
    records = {}
    for how in ("eager", "observed"):
        torch.compiler.reset()
        with recording({**SPEC, "compile": how}) as traced:
            found = seeded(training, Told(listening=False))
        assert traced.faults == []
        assert traced.report["warnings"] == []
        same(plain, found)
        records[how] = [contents(traced, number) for number in range(len(traced.steps))]
    assert any(node.endswith("block.two") for node, _ in shown)
    assert ("", "gradient") in shown
    for eager, observed in zip(records["eager"], records["observed"], strict=True):
        assert eager == observed


@pytest.mark.slow
@pytest.mark.parametrize("make", shortened([Checkpointed, Outermost], tried=1))
def test_gradients_of_checkpointed_code_are_recorded_in_observed_steps(
    make: Make, shown: list[tuple[str, str]]
) -> None:
    assert proven(Training(make)).report["warnings"] == []
    assert ("", "gradient") in shown


@pytest.mark.slow
def test_checkpointed_code_is_observed_once_where_no_gradient_of_it_is_wanted(
    shown: list[tuple[str, str]],
) -> None:
    nodes = {"all": {"select": "**", "capture": ["output", "parameter_grad"]}}
    training = partial(Training(Checkpointed), compile_it=compiled)
    plain = seeded(training, Told(listening=False))
    torch.compiler.reset()
    with recording({**SPEC, "compile": "auto", "nodes": nodes}) as traced:
        found = seeded(training, Told(listening=False))
    assert traced.faults == []
    same(plain, found)
    assert traced.report["warnings"] == []
    assert ("block.two", "output") in shown


# -- with inductor ---------------------------------------------------------------------------------


class Counted(nn.Module):
    """Computes with values that change in between: its input, a buffer, batch statistics."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.keep, self.norm = nn.Identity(), nn.BatchNorm1d(8)
        self.one = nn.Linear(6, 8, bias=False)  # norms cancel it, so it has no gradient
        self.relu, self.two = nn.ReLU(inplace=True), nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.keep(x)
        hidden = self.norm(self.one(kept * 2))
        x.mul_(0.5)
        self.calls += 1
        hidden = self.relu(hidden)
        result: torch.Tensor = self.two(hidden) + self.calls
        return result


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Counted, marks=pytest.mark.slow),
        pytest.param(Changed, marks=pytest.mark.slow),
        pytest.param(Looped, marks=pytest.mark.slow),
    ],
)
def test_code_that_inductor_reads_late_shows_what_was_there_before(make: Make) -> None:
    """Equal within rounding to the same record taken eagerly; later changes differ by more."""
    found = []
    for how in ("eager", "observed"):
        torch.compiler.reset()
        changes = {"compile": how, "schedule": {"first": 2}}
        with recording({**SPEC, **changes}) as traced:
            training = Training(make, steps=2)  # nothing is compiled for other steps
            seeded(
                partial(training, compile_it=lambda n: compiled(n, "inductor")),
                Told(listening=False),
            )
        assert traced.faults == []
        assert traced.report["warnings"] == []
        names = {info.id: key for key, info in traced.slots.items()}
        values = traced.steps[1].values
        found.append({names[slot]: torch.from_numpy(value) for slot, value in values.items()})
    eager, observed = found
    assert eager.keys() == observed.keys()
    for name, value in eager.items():
        torch.testing.assert_close(observed[name], value, rtol=1e-4, atol=1e-5, msg=str(name))


@pytest.mark.slow
def test_observed_code_of_inductor_is_hardly_more_to_compile_on_a_cpu() -> None:
    """The C++ compiler takes most of the time; the number of pieces it receives hardly grows."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    pieces: list[str] = []
    compile_piece = AsyncCompile.cpp_pybinding

    def counting(self: Any, types: Any, source: str) -> Any:
        pieces.append(source)
        return compile_piece(self, types, source)

    def net() -> nn.Module:
        parts = [[nn.Conv2d(c, 8, 3), nn.BatchNorm2d(8), nn.ReLU()] for c in (3, 8, 8)]
        return nn.Sequential(*(part for three in parts for part in three), nn.Flatten())

    def compiled_in(first: int) -> int:
        torch.compiler.reset()
        pieces.clear()
        called = compiled(net(), "inductor")
        with recording({**SPEC, "schedule": {"first": first}}) as traced:
            for _ in range(first):
                called(torch.randn(2, 3, 10, 10)).sum().backward()
                comgra.step()
        assert traced.faults == []
        return len(pieces)

    with pytest.MonkeyPatch.context() as patched, config.patch(force_disable_caches=True):
        patched.setattr(AsyncCompile, "cpp_pybinding", counting)
        observed = compiled_in(2)
        called = compiled(net(), "inductor")
        torch.compiler.reset()
        pieces.clear()
        called(torch.randn(2, 3, 10, 10)).sum().backward()
        plain = len(pieces)
    assert 0 < plain <= observed <= plain + 3


class Collecting(nn.Module):
    """Returns what the parts of a model return, from within one compiled graph."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for part in self.net:
            x = part(x)
            found.append(x)
        return found


@pytest.mark.slow
def test_observed_code_of_inductor_shows_what_that_code_computes() -> None:
    """Compared with the same model, compiled so that it returns its hidden tensors itself."""
    torch.manual_seed(0)
    net = model()
    called = compiled(net, "inductor")
    ((x, y),) = batches(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with recording({**SPEC, "schedule": {"first": 2}}) as traced:
        for _ in range(2):
            optimizer.zero_grad()
            cross_entropy(called, x, y)
            optimizer.step()
    assert traced.faults == []
    assert traced.report["warnings"] == []
    hidden = compiled(Collecting(net), "inductor")(x)
    for number, tensor in enumerate(hidden):
        value = torch.from_numpy(traced.value(str(number), step=1))
        torch.testing.assert_close(value, tensor.detach(), rtol=1e-6, atol=1e-7)
    eager = Collecting(net)(x)
    for tensor in eager:
        tensor.retain_grad()
    F.cross_entropy(eager[-1], y).backward()
    for number, tensor in enumerate(eager):
        value = torch.from_numpy(traced.value(str(number), step=1, pass_="grad"))
        torch.testing.assert_close(value, tensor.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("mode", shortened(["reduce-overhead", "max-autotune"], tried=1))
def test_observed_steps_are_compiled_without_the_cuda_graphs_of_all_others(
    mode: str, shown: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Returns the code that inductor receives for each graph, forward and backward."""
    from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
    from torch._inductor import compile_fx, config

    reached: list[tuple[bool, bool]] = []

    def lower(graph: torch.fx.GraphModule, *_: Any, **__: Any) -> Any:
        observed = any("comgra_decl" in str(node.args) for node in graph.graph.nodes)
        reached.append((observed, bool(config.triton.cudagraphs)))
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", lower)
    training = partial(Training(model), compile_it=lambda net: torch.compile(net, mode=mode))
    with config.patch(force_disable_caches=True), recording(SPEC) as traced:
        seeded(training, Told(listening=False))
    assert traced.faults == []
    assert ("", "gradient") in shown
    assert {*reached} == {(False, True), (True, False)}
    (said,) = traced.report["warnings"]
    assert "Recorded steps run without CUDA graphs" in said


@pytest.mark.slow
@pytest.mark.parametrize("function", [False, True])
def test_observed_steps_draw_the_numbers_that_plain_compiled_steps_draw(function: bool) -> None:
    """Dropout masks, noise; eager code draws others from the same seed."""

    def losses(**changes: Any) -> torch.Tensor:
        torch.compiler.reset()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3), nn.Dropout(0.1))

        def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(net(x + torch.randn_like(x)), y)

        called: Any = torch.compile(compute) if function else torch.compile(net)
        found = []
        with recording({**SPEC, **changes}) as traced:
            for step, (x, y) in enumerate(batches(3)):
                torch.manual_seed(step)
                loss = called(x, y) if function else F.cross_entropy(called(x), y)
                loss.backward()
                found.append(loss.detach())
                comgra.step()
        assert traced.faults == []
        assert traced.report["warnings"] == []
        return torch.stack(found)[1:]

    plain = losses(schedule={"first": 1, "every": 100})
    observed = losses(schedule={"first": 3})
    torch.testing.assert_close(observed, plain, rtol=1e-5, atol=1e-6)
    eager = losses(schedule={"first": 3}, compile="eager")
    assert (eager - plain).abs().min() > 1e-3
