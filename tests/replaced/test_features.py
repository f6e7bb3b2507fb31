"""What comgra's recorder can do, done by declaration; one test per feature."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comgra_decl as comgra
from tests.support.traced import roles, traced, train

ALL = {"all": {"select": "**", "capture": ["output", "output_grad"], "values": True}}
WEIGHTS = {"weights": {"select": "**", "capture": ["parameter", "parameter_grad"]}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))


class Net(nn.Module):
    """Two blocks of one class, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recurrent(nn.Module):
    """A cell that is called once for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            state = torch.tanh(self.memory(torch.cat([x[:, t], state], 1)))
        return state


def classify(model: nn.Module, *, steps: int = 1, batch: int = 5) -> None:
    """A plain loop that knows nothing of tracing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(batch, 4)), torch.randint(3, (batch,))).backward()
        optimizer.step()


def told(steps: int, say: Callable[[int], Any] | None = None) -> Callable[[], None]:
    """A function that trains, and says something before each step."""

    def training() -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            if say is not None:
                say(step)
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()

    return training


def test_r01_nothing_is_passed_around(tmp_path: Path) -> None:
    first = traced(tmp_path, ALL, lambda: classify(Net()))
    second = traced(tmp_path, ALL, lambda: classify(Net(), steps=2))
    assert (len(first.records), len(second.records)) == (1, 2)
    assert first.path != second.path


def test_r02_modules_and_parameters_are_found_from_the_model(tmp_path: Path) -> None:
    net = Net()
    run = traced(tmp_path, ALL | WEIGHTS, lambda: classify(net))
    assert {m["path"] for m in run.modules} == {name for name, _ in net.named_modules()}
    slots = run.slots[run.slots.kind == "parameter"]
    seen = {f"{slot.node}.{slot.role}" for slot in slots.itertuples()}
    assert seen == {name for name, _ in net.named_parameters()}


def test_r03_a_class_used_twice_has_two_names(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL, lambda: classify(Net()))
    assert {"blocks.0.inner", "blocks.1.inner"} <= {*run.nodes}


def test_r04_inputs_parameters_targets_and_losses_are_found(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL | WEIGHTS, lambda: classify(Net()))
    assert {*run.slots.kind} >= {"input", "parameter", "computed", "target", "loss"}


def test_r04_a_tensor_can_be_named_by_hand(tmp_path: Path) -> None:
    def training() -> None:
        net, x = Net(), torch.randn(5, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        hidden = net.blocks[0](x)
        comgra.node(hidden * 2, "doubled", role="helper", kind="target")
        net.head(hidden).sum().backward()
        optimizer.step()

    run = traced(tmp_path, ALL, training)
    (slot,) = run.slots[run.slots.node == "doubled"].itertuples()
    assert (slot.role, slot.kind) == ("helper", "target")
    assert run.value("doubled", 0, role="helper").shape == (5, 4)


def test_r05_the_loop_has_no_calls(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL, lambda: classify(Net(), steps=3))
    assert run.steps.tolist() == [0, 1, 2]


def test_r06_a_step_has_as_many_iterations_as_calls(tmp_path: Path) -> None:
    def training() -> None:
        net = Recurrent()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for length in (2, 4):
            net(torch.randn(3, length, 2)).sum().backward()
            optimizer.step()

    run = traced(tmp_path, ALL, training)
    last = run.series("memory", "mean", iteration=3)
    assert np.isnan(last[0])
    assert np.isfinite(last[1])
    assert run.slots.iteration[run.row(0).index].max() == 1
    assert run.structure(0) != run.structure(1)


def test_r07_tensors_share_a_node_by_role(tmp_path: Path) -> None:
    split = {"heads": {"select": "head", "split": {"dim": 1, "name": "class"}}}
    run = traced(tmp_path, split, lambda: classify(Net()))
    assert roles(run, "head") == ["output", "output.class 0", "output.class 1", "output.class 2"]


def test_r08_a_tensor_may_have_several_names(tmp_path: Path) -> None:
    def training() -> None:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        out = net(torch.randn(5, 4))
        comgra.node(comgra.node(out, "logits"), "answer", kind="target")
        out.sum().backward()
        optimizer.step()

    run = traced(tmp_path, ALL, training)
    for name in ("logits", "answer"):
        np.testing.assert_array_equal(run.value(name, 0), run.value("head", 0))


def test_r09_what_comes_from_an_earlier_step_is_a_node(tmp_path: Path) -> None:
    def training() -> None:
        cell = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
        state = torch.zeros(2, 4)
        for _ in range(4):
            optimizer.zero_grad()
            state = torch.tanh(cell(state.detach()))
            state.sum().backward()
            optimizer.step()

    run = traced(tmp_path, {"cell": {"select": "**"}}, training)
    structure = run.structure(3)
    assert structure is not None
    assert any("earlier" in key.node or "earlier" in key.role for key in structure.keys)


def test_r10_statistics_over_the_values(tmp_path: Path) -> None:
    stats = ["mean", "abs_mean", "std", "abs_max", "l2", "min", "max", "q50", "singular_value"]
    net = Net()
    weight = net.head.weight.detach().numpy().copy()
    run = traced(tmp_path, ALL | WEIGHTS, lambda: classify(net), stats=stats)
    slots = run.slots
    (slot,) = slots.index[
        (slots.node == "head") & (slots.role == "weight") & (slots["pass"] == "forward")
    ]
    row = run.row(0).loc[slot]
    expected = {
        "mean": weight.mean(),
        "abs_mean": np.abs(weight).mean(),
        "std": weight.std(),
        "abs_max": np.abs(weight).max(),
        "l2": np.linalg.norm(weight),
        "min": weight.min(),
        "max": weight.max(),
        "q50": np.quantile(weight, 0.5),
        "singular_value": np.linalg.norm(weight, 2),
    }
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-3), name


def test_r11_samples_come_before_the_batch(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL, lambda: classify(Net(), batch=4), samples={"count": 4})
    value = run.value("head", 0)
    largest = value.max(1)
    for over, expected in [
        ("mean", largest.mean()),
        ("std", largest.std()),
        ("abs_max", np.abs(largest).max()),
    ]:
        assert run.series("head", "max", over_batch=over)[0] == pytest.approx(expected, rel=1e-5)
    assert run.sample_series("head", "max", sample=2)[0] == pytest.approx(largest[2])


def fraction_above(x: torch.Tensor, limit: float = 0.0) -> torch.Tensor:
    """A statistic of the user's: the share of values above a limit, per sample."""
    return (x.flatten(1) > limit).float().mean(1)


def test_r12_a_reduction_can_be_the_users_own(tmp_path: Path) -> None:
    own = {"name": "above", "_target_": f"{__name__}.fraction_above", "limit": 0.1}
    run = traced(tmp_path, ALL, lambda: classify(Net()), stats=["mean", own], samples={"count": 5})
    expected = (run.value("head", 0) > 0.1).mean()
    assert run.series("head", "above")[0] == pytest.approx(expected, rel=1e-6)


def test_r13_each_loss_has_gradients_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(5, 4)
    out = net(x)
    first, second = (torch.autograd.grad(f(net(x)), net.head.bias)[0] for f in (_sum, _squares))

    def training() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        hidden = net(x)
        _sum(hidden).backward(retain_graph=True)
        _squares(hidden).backward()
        optimizer.step()

    run = traced(tmp_path, ALL, training, samples={"count": 5})
    passes = [p for p in run.slots[run.slots.node == "head"]["pass"] if p.startswith("grad")]
    assert len(passes) == 2
    for pass_, bias in zip(passes, (first, second), strict=True):
        gradient = run.value("head", 0, pass_=pass_)
        np.testing.assert_allclose(gradient.sum(0), bias.numpy(), rtol=1e-5)
    np.testing.assert_array_equal(run.value("head", 0), out.detach().numpy())


def _sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def _squares(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum()


def test_r14_the_graph_is_that_of_the_named_tensors_without_autograd_too(tmp_path: Path) -> None:
    def training() -> None:
        with torch.no_grad():
            Net()(torch.randn(5, 4))

    run = traced(tmp_path, {"linear": {"select": {"class": "Linear"}}}, training)
    expected = [("blocks.0.inner", "blocks.1.inner"), ("blocks.1.inner", "head")]
    assert {*expected, ("input", "blocks.0.inner")} <= {*run.edges()}


def test_r15_an_edge_can_be_stated(tmp_path: Path) -> None:
    class Outside(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.blocks[0](x)
            back = torch.from_numpy(np.tanh(hidden.detach().numpy()))
            comgra.connect(hidden, back)
            return self.head(back)

    run = traced(tmp_path, ALL, lambda: classify(Outside()))
    assert ("blocks.0", "head") in run.edges()


def test_r16_each_type_has_a_frequency_of_its_own(tmp_path: Path) -> None:
    schedule = {"first": 0, "every": None, "types": {"long": {"every": 2}, "short": {"every": 4}}}
    training = told(16, lambda step: comgra.tag("long" if step % 2 else "short"))
    run = traced(tmp_path, ALL, training, schedule=schedule)
    by_type = {t: g.step.tolist() for t, g in run.records.groupby("type")}
    assert by_type == {"long": [1, 5, 9, 13], "short": [0, 8]}


def test_r16_records_become_rarer(tmp_path: Path) -> None:
    training = told(40)
    run = traced(tmp_path, ALL, training, schedule={"first": 0, "every": 1, "backoff": 2.0})
    assert run.steps.tolist() == [0, 1, 3, 7, 15, 31]


def test_r17_steps_can_be_listed(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL, told(9), schedule={"steps": [1, 4, 7]})
    assert run.steps.tolist() == [1, 4, 7]


def test_r18_a_step_has_a_type_and_further_tags_of_any_text(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL, told(2, lambda step: comgra.tag(f"länge {step}", "a b")))
    assert run.types == ["länge 0", "länge 1"]
    assert run.tags == ["a b"]
    assert run.series("Linear", type_="a b").index.tolist() == [0, 1]


def test_r19_evaluation_is_a_mode_of_its_own(tmp_path: Path) -> None:
    def training() -> None:
        net = Net()
        classify(net, steps=2)
        net.eval()
        with torch.no_grad():
            net(torch.randn(7, 4))

    run = traced(tmp_path, ALL, training)
    assert run.records["mode"].tolist() == ["train", "train", "eval"]
    assert len(run.series("head", type_="eval")) == 1


def test_r20_it_can_be_decided_after_the_step(tmp_path: Path) -> None:
    def training() -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(40):
            x = torch.ones(2, 3) * (float("nan") if step == 30 else 1.0)
            loss = model(x).sum()
            optimizer.zero_grad()
            if step != 30:
                loss.backward()
            else:
                (loss * 0 + 1.0).backward()
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()

    run = traced(
        tmp_path,
        ALL,
        training,
        schedule={"steps": [0]},
        keep={"ring": 3, "when": ["nonfinite"]},
    )
    assert run.steps.tolist() == [0, 27, 28, 29, 30]


def test_r20_samples_are_taken_evenly_from_categories(tmp_path: Path) -> None:
    def training() -> None:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        targets = torch.tensor([0] * 8 + [1, 2])
        F.cross_entropy(net(torch.randn(10, 4)), targets).backward()
        optimizer.step()

    run = traced(tmp_path, ALL, training, samples={"count": 3, "by": "target"})
    assert sorted(run.sample_row("head", 0).attrs["batch_index"]) == [0, 8, 9]


def test_r21_a_type_that_comes_late_needs_no_announcement(tmp_path: Path) -> None:
    training = told(30, lambda step: comgra.tag("rare") if step in (10, 20) else None)
    run = traced(tmp_path, ALL, training, schedule={"first": 1, "every": 100})
    assert "rare" in run.types


def test_r22_the_number_of_samples_is_bounded(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL, lambda: classify(Net(), batch=9), samples={"count": 2})
    assert run.value("head", 0).shape == (2, 3)
    assert run.sample_row("head", 0).attrs["batch_index"] == [0, 1]


def test_r23_curves_keep_every_point(tmp_path: Path) -> None:
    training = told(100, lambda step: comgra.kpi("accuracy", step / 7))
    run = traced(tmp_path, ALL, training, schedule={"steps": [0]})
    kpis = run.kpis()
    accuracy = kpis[kpis.name == "accuracy"]
    assert accuracy.step.tolist() == list(range(100))
    assert accuracy.value.tolist() == [step / 7 for step in range(100)]
    assert len(kpis[kpis.name == "loss"]) == 100


def test_r24_notes_are_kept(tmp_path: Path) -> None:
    def say(step: int) -> None:
        if step % 40 == 0:
            comgra.note(f"step {step}: all is well")

    run = traced(tmp_path, ALL, told(100, say), schedule={"steps": [0]})
    assert run.notes().step.tolist() == [0, 40, 80]
    assert run.notes().text[1] == "step 40: all is well"


def test_r25_parameters_are_grouped_by_the_tree_of_modules(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL | WEIGHTS, lambda: classify(Net()))
    assert roles(run, "blocks.0.inner")[:2] == ["weight", "bias"]
    (head,) = [m for m in run.modules if m["path"] == "head"]
    assert head["parameters"]["weight"]["count"] == 12


def test_r26_one_switch_turns_everything_off(tmp_path: Path) -> None:
    with comgra.trace("off", root=tmp_path) as session:
        classify(Net())
    assert session.path is None
    assert list(tmp_path.iterdir()) == []


def test_r27_values_keep_their_type(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).to(torch.bfloat16)
    run = traced(tmp_path, ALL, lambda: train(model, torch.ones(4, 3, dtype=torch.bfloat16)))
    assert str(run.value("Linear", 0).dtype) == "bfloat16"


def test_r28_what_recording_cost_is_in_the_record(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL, lambda: classify(Net(), steps=2))
    assert (run.records.cost > 0).all()


def test_r29_a_run_is_read_as_tables(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL, lambda: classify(Net(), steps=3))
    assert run.series("head", "std").index.tolist() == [0, 1, 2]
    assert run.row(2).shape[0] == len(run.slots)
    assert [*map(int, run.heat("std").columns)] == [0, 1, 2]
