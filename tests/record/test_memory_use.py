"""What modules hold in the measured steps, and that measuring changes nothing."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from comgra_decl.cli.main import main
from comgra_decl.errors import UnknownNameError
from comgra_decl.hooks.measuring import memory
from comgra_decl.hooks.measuring.saved import are_hooks_free
from comgra_decl.query import Run
from comgra_decl.records import OTHER
from tests.record.test_around import HEALTHY, traced
from tests.record.test_profile import BATCH, WIDTH, Net, program
from tests.support.shortened import shortened
from tests.support.uncompiled import uncompiled as uncompiled  # applies to all tests here

STEP = 4
SPEC = {"memory": {"steps": STEP}, "schedule": {"first": 100}}
HIDDEN = BATCH * WIDTH * 4
"""Bytes of a hidden tensor of the program."""


def saved_by(call: Callable[[], Tensor], model: nn.Module) -> int:
    """Return the bytes that autograd saves in a call, apart from parameters, seen from outside."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()
    assert out.requires_grad
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(size for address, size in seen.items() if address not in weights)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return traced(tmp_path_factory.mktemp("memory"), program, **SPEC)


@pytest.mark.slow
def test_activations_are_what_autograd_saves(run: Run) -> None:
    model = Net()
    expected = saved_by(lambda: model(torch.randn(BATCH, 16)), model)
    table = run.memory()
    assert table.loc["Net", "activations"] == expected
    assert table["activations_self"].sum() == expected
    assert table.loc["Net", "peak"] == expected


def test_each_storage_is_counted_for_the_module_that_saves_it_first(run: Run) -> None:
    table = run.memory()
    assert table.loc["first", "activations"] == BATCH * 16 * 4  # the model's input
    assert table.loc["block.twice", "activations"] == HIDDEN  # the input of its first call
    # the result of relu, which is also the input of the second call, and the checkpoint's input
    assert table.loc["block", "activations_self"] == 2 * HIDDEN
    assert table.loc["block", "activations"] == 3 * HIDDEN
    assert table.loc["block.kept", "activations"] == 0  # a checkpoint saves nothing
    assert table.loc["head", "activations"] == HIDDEN
    assert table.loc["block", "checkpoint_saves"] == 2 * HIDDEN
    assert table["allocated"].isna().all()
    assert table["calls"].to_dict() == {
        "Net": 1, "block": 1, "block.twice": 2, "block.kept": 1, "first": 1, "head": 1
    }  # fmt: skip


def test_parameters_gradients_and_states_are_those_of_the_model(run: Run) -> None:
    model, table = Net(), run.memory()
    for node in ("Net", "block", "block.twice", "first"):
        part = model if node == "Net" else model.get_submodule(node)
        size = sum(p.numel() * p.element_size() for p in part.parameters())
        count = len([*part.parameters()])
        assert table.loc[node, "parameters"] == size
        assert table.loc[node, "gradients"] == size
        assert table.loc[node, "optimizer"] == 2 * size + 4 * count  # Adam, with its step numbers


def test_saved_tensors_are_followed_through_the_step(run: Run) -> None:
    model, table = Net(), run.memory(by="moment")
    expected = saved_by(lambda: model(torch.randn(BATCH, 16)), model)
    held = table.sum(axis=1)
    assert held.max() == expected
    assert (held.iloc[-1], table.to_numpy().min()) == (0, 0), "the backward pass releases all"
    peak = int(held.to_numpy().argmax())
    assert held.iloc[: peak + 1].is_monotonic_increasing
    assert held.iloc[peak:].is_monotonic_decreasing
    own = run.memory()["activations_self"]
    assert table.max().to_dict() == own[own > 0].to_dict()
    assert [*table.columns] == ["first", "block.twice", "block", "head"]


def test_each_measured_step_has_its_totals(tmp_path: Path) -> None:
    run = traced(tmp_path, program, **{**SPEC, "memory": {"steps": [3, 5]}})
    table, model = run.memory(by="step"), Net()
    assert [*table.index] == [3, 4, 5]
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert (table["parameters"] == size).all()
    assert (table["gradients"] == size).all()
    assert (table["activations"] == run.memory().loc["Net", "peak"]).all()
    assert table["other"].isna().all(), "there is no device"
    totals = run.memory(by="moment").attrs["totals"]
    assert totals["gradients_before"] in (0, size)


ONE = 32 * 16 * 4
"""Bytes of a batch of `micro_batches`."""


def micro_batches(number: int, *, together: bool = False) -> Callable[[], None]:
    """Return a program whose steps accumulate gradients, of all batches together or one by one."""

    def program() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Sequential(nn.Linear(16, 4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEP + 2):
            losses = []
            for _ in range(number):
                losses.append(model(torch.randn(32, 16)).sum())
                if not together:
                    losses.pop().backward()
            if losses:
                torch.stack(losses).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return program


@pytest.mark.parametrize("number", [1, 2, 5])
def test_micro_batches_hold_no_more_than_one_of_them(number: int, tmp_path: Path) -> None:
    table = traced(tmp_path, micro_batches(number), **SPEC).memory()
    assert set(table["calls"]) == {number}
    # the input for Linear, and the result for Tanh, which is also the input of the last one
    expected = {"Sequential": 0, "0": ONE, "1": ONE, "2": 0, "2.0": 0}
    assert table["activations_self"].to_dict() == expected
    assert table["activations"].to_dict() == {**expected, "Sequential": 2 * ONE}
    assert (table["peak"] == table["activations"]).all()
    assert table.loc["Sequential", "checkpoint_saves"] == ONE
    assert table["checkpoint_saves"].drop("Sequential").eq(0).all()


def test_micro_batches_before_one_backward_pass_are_held_together(tmp_path: Path) -> None:
    table = traced(tmp_path, micro_batches(3, together=True), **SPEC).memory()
    assert table.loc["Sequential", "activations"] == 6 * ONE
    assert table["activations_self"].to_dict() == {
        "Sequential": 0, "0": 3 * ONE, "1": 3 * ONE, "2": 0, "2.0": 0
    }  # fmt: skip
    assert table.loc["Sequential", "checkpoint_saves"] == 3 * ONE


def test_unknown_tables_are_refused(run: Run) -> None:
    with pytest.raises(UnknownNameError, match="'node', 'step' or 'moment', got 'steps'"):
        run.memory(by="steps")


def test_the_measured_step_is_not_recorded(run: Run) -> None:
    assert [*run.steps] == [step for step in range(10) if step != STEP]
    assert run.damage == []


@pytest.mark.parametrize(
    "program", shortened(HEALTHY, tried=4), ids=lambda program: program.__name__
)
def test_measured_programs_train_bit_equal(
    program: Callable[[], list[float]], tmp_path: Path
) -> None:
    plain, state = program(), torch.get_rng_state()
    losses: list[float] = []
    run = traced(
        tmp_path, lambda: losses.extend(program()), memory={"steps": [3, 5]}, profile={"steps": 4}
    )
    assert losses == plain
    assert torch.equal(torch.get_rng_state(), state)
    table = run.memory()
    assert (table["parameters"] >= table["gradients"]).all()
    assert (table["peak"] >= table["activations"]).all()
    assert table["activations"].max() > 0
    assert len(run.profile(by="step")) == 1


def test_functions_that_do_not_allow_hooks_still_run(tmp_path: Path) -> None:
    class Transformed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            slope = torch.func.grad(lambda t: self.first(t).square().sum())(x)
            out: Tensor = self.last(slope)
            return out

    def train() -> list[float]:
        torch.manual_seed(0)
        model, losses = Transformed(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    plain, traced_losses = train(), []
    run = traced(tmp_path, lambda: traced_losses.extend(train()), **SPEC)
    assert traced_losses == plain
    assert any("do not allow tensors to be followed" in each for each in run.report["warnings"])
    assert run.memory().loc["first", "parameters"] == 80


def test_hooks_of_the_program_remain_in_place(tmp_path: Path) -> None:
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    def train() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            for _ in range(8):
                (model(torch.ones(2, 4)) ** 2).sum().backward()
                optimizer.step()

    train()
    plain, saved[:] = [*saved], []
    run = traced(tmp_path, train, **SPEC)
    assert saved == plain
    assert any("uses hooks for saved tensors itself" in each for each in run.report["warnings"])
    assert run.memory().loc["Linear", "activations"] == 0


class Squashed(nn.Module):
    """A sigmoid, which saves its own result, after a layer; `within` is called in the middle."""

    def __init__(self, within: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)
        self.within = within

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.layer(x))
        self.within()
        return torch.tanh(x)


def trained(model: nn.Module, step: Callable[[], Any], steps: int = STEP + 2) -> None:
    """Train a model, after something else in each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        step()
        model(torch.randn(BATCH, 16)).sum().backward()
        optimizer.step()


def test_results_without_a_backward_pass_are_freed(tmp_path: Path) -> None:
    model, kept, saved = Squashed(), [], []

    def call() -> None:
        result = model(torch.randn(BATCH, 16))
        saved.append(type(result.grad_fn._raw_saved_result) is not None)
        kept.append(weakref.ref(result))
        del result
        gc.collect()
        assert kept[-1]() is None

    run = traced(tmp_path, lambda: trained(model, call), **SPEC)
    assert len(saved) == STEP + 2
    assert run.report["warnings"] == []
    assert run.memory().loc["Squashed", "calls"] == 2


def test_only_the_inputs_of_calls_that_save_are_what_a_checkpoint_would_keep(
    run: Run, tmp_path: Path
) -> None:
    def inputs(run: Run) -> dict[str, int]:
        return {row["node"]: row["inputs"] for row in run.document("memory")["rows"]}

    assert inputs(run)["block.kept"] == HIDDEN  # its call is repeated in the backward pass
    model = Squashed()
    evaluate = torch.no_grad()(lambda: model(torch.randn(BATCH, 16)))
    evaluated = traced(tmp_path, lambda: trained(model, evaluate), **SPEC)
    assert inputs(evaluated)["layer"] == BATCH * 16 * 4
    assert evaluated.memory().loc["layer", "calls"] == 2


class Encoder(nn.Module):
    """Two encoder layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize(
    ("make", "shape", "node"),
    [(Net, (BATCH, 16), "block"), (Net, (BATCH, 16), "head"),
     (Encoder, (4, 10, 16), "layers.0"), (Encoder, (4, 10, 16), "layers.1"),
     (Encoder, (4, 10, 16), "layers.1.self_attn")],
)  # fmt: skip
def test_the_hint_is_what_a_checkpoint_really_saves(
    make: Callable[[], nn.Module], shape: tuple[int, ...], node: str, tmp_path: Path
) -> None:
    """Seen from outside: what autograd saves with and without the checkpoint."""

    def trains() -> None:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEP + 2):
            optimizer.zero_grad()
            model(torch.randn(shape)).square().mean().backward()
            optimizer.step()

    told = traced(tmp_path, trains, **SPEC).memory().loc[node, "checkpoint_saves"]
    model, x = make(), torch.randn(shape)
    without = saved_by(lambda: model(x), model)
    part = model.get_submodule(node)
    plain = part.forward

    def kept(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda *each: plain(*each, **kwargs), *args, use_reentrant=True)

    vars(part)["forward"] = kept
    assert told == without - saved_by(lambda: model(x), model)


def test_keyword_arguments_are_inputs_as_well(tmp_path: Path) -> None:
    class Added(nn.Module):
        def forward(self, x: Tensor, *, more: dict[str, Tensor]) -> Tensor:
            return x.exp() * more["scale"]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.added = nn.Linear(16, 8), Added()

        def forward(self, x: Tensor) -> Tensor:
            scale = x.new_ones(3, BATCH, 8)
            return self.added(self.layer(x), more={"scale": scale})

    run = traced(tmp_path, lambda: trained(Outer(), lambda: None), **SPEC)
    table = run.memory()
    # the result of `exp` is saved; the scale is also an input, and `layer`'s output is only that
    result, scale = BATCH * 8 * 4, 3 * BATCH * 8 * 4
    assert table.loc["added", "activations"] == result + scale
    (inputs,) = (r["inputs"] for r in run.document("memory")["rows"] if r["node"] == "added")
    assert inputs == result + scale
    assert table.loc["added", "checkpoint_saves"] == 0


def test_models_in_several_threads_are_measured_side_by_side(tmp_path: Path) -> None:
    """The other model is called while a call of the first one is in progress."""

    class Other(Squashed):
        pass

    other, refused = Other(), []
    expected = saved_by(lambda: other(torch.randn(2 * BATCH, 16)), other)

    def call() -> None:
        other(torch.randn(2 * BATCH, 16))
        # does not allow hooks in this thread; those of the other thread remain
        refused.append(torch.func.grad(lambda t: t.square().sum())(torch.ones(2)))

    def beside() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    run = traced(tmp_path, lambda: trained(Squashed(beside), lambda: None), **SPEC)
    alone = Squashed()
    table = run.memory()
    assert run.report["warnings"] == []
    assert len(refused) == STEP + 2
    assert table.loc["Other", "activations"] == expected
    first = saved_by(lambda: alone(torch.randn(BATCH, 16)), alone)
    assert table.loc["Squashed", "activations"] == first


def test_hooks_that_a_call_leaves_in_place_remain_the_programs(tmp_path: Path) -> None:
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    def train() -> None:
        hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
        model = Squashed(hooks.__enter__)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEP + 2):
            out = model(torch.randn(BATCH, 16))
            loss = (out * out).sum()  # seen by the program's hooks
            hooks.__exit__()
            (loss + out.exp().sum()).backward()  # seen by none
            optimizer.step()

    train()
    plain, saved[:] = [*saved], []
    run = traced(tmp_path, train, **SPEC)
    assert saved == plain
    assert run.report["warnings"] == []
    table = run.memory()
    assert table.loc["Squashed", "activations"] == BATCH * (16 + 8) * 4  # up to the program's hooks


def test_a_thread_that_is_in_a_call_when_the_measurement_ends_is_left_without_hooks(
    tmp_path: Path,
) -> None:
    entered, ended, seen = threading.Event(), threading.Event(), []

    def wait() -> None:
        entered.set()
        assert ended.wait(60)

    def call() -> None:
        out = Squashed(wait)(torch.randn(BATCH, 16))
        seen.append(are_hooks_free())
        out.sum().backward()

    thread = threading.Thread(target=call)
    step = iter(range(STEP + 2))

    def begin() -> None:
        if next(step) == STEP:
            thread.start()
            assert entered.wait(60)

    hooks = nn.modules.module._global_forward_hooks
    before = len(hooks)
    run = traced(tmp_path, lambda: trained(Squashed(), begin), **SPEC)
    ended.set()
    thread.join()
    assert seen == [True]
    assert len(hooks) == before
    assert run.memory().loc["Squashed", "calls"] == 2


def test_an_error_in_the_measurement_ends_only_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Tensor) -> int:
        raise OSError("no address")

    monkeypatch.setattr(memory, "_address", fail)
    plain, losses = program(), []
    run = traced(tmp_path, lambda: losses.extend(program()), **SPEC, profile={"steps": STEP})
    assert losses == plain
    assert len(run.profile(by="step")) == 1
    assert run.document("memory") is None
    assert len(run.steps) == 9
    (warning,) = run.report["warnings"]
    assert warning.startswith("memory: steps 4 to 4 are not measured")
    assert are_hooks_free()


def test_what_belongs_to_no_node_is_the_rest_of_the_devices_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The CPU plays the device, and its allocator reports a round number."""
    monkeypatch.setattr(memory, "_DEVICE", "cpu")
    monkeypatch.setattr(memory, "_allocated", lambda: 0)
    monkeypatch.setattr(memory, "_requested", lambda: 1_000_000)
    run = traced(tmp_path, program, **SPEC)
    parameters = [*Net().parameters()]
    size = sum(p.numel() * p.element_size() for p in parameters)
    table = run.memory()
    rest = 1_000_000 - 4 * size - 4 * len(parameters)  # with Adam's states and step numbers
    assert table.loc[OTHER, "allocated"] == rest
    assert table.loc[OTHER].drop("allocated").eq(0).all()
    assert table.index[0] == OTHER  # nothing else holds as much
    with pytest.raises(SystemExit):
        main(["memory", str(run.path)])
    text = capsys.readouterr().out
    assert f"{rest / 1e6:.2f}" in next(line for line in text.splitlines() if OTHER in line)
    assert "A checkpoint (torch.utils.checkpoint) of block would save 0.02 MB" in text


def test_the_command_prints_the_table_and_a_hint(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["memory", str(run.path), *arguments])
        assert ended.value.code == 0
        return capsys.readouterr().out

    text = printed()
    assert "block.twice" in text
    assert "A checkpoint (torch.utils.checkpoint) of block would save 0.02 MB" in text
    assert "temporary memory is not measured" in text
    rows = {row["node"]: row for row in json.loads(printed("--json"))["nodes"]}
    assert rows["block"]["activations"] == 3 * HIDDEN
    assert rows["block"]["allocated"] is None


def test_a_run_without_a_measurement_says_how_to_make_one(tmp_path: Path) -> None:
    run = traced(tmp_path, lambda: program(2))
    with pytest.raises(UnknownNameError, match=r"memory: \{steps: 10\}"):
        run.memory()
