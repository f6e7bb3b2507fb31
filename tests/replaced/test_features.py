"""What comgra records and how it reduces it, in comgra_decl (R01 to R15)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import comgra_decl as comgra
from tests.replaced.nets import ALL, WEIGHTS, Net, Recurrent, classify
from tests.support.traced import roles, traced


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
    assert run.slot("doubled", role="helper").value(0).shape == (5, 4)


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
    last = run.slot("memory", iteration=3).series("mean")
    assert np.isnan(last[0])
    assert np.isfinite(last[1])
    assert run.row(0).index.get_level_values("iteration").max() == 1
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
    row = run.row(0).xs(("head", "weight", 0, "forward"))
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
    assert run.slot("head").samples("max")[2][0] == pytest.approx(largest[2])


def fraction_above(x: torch.Tensor, limit: float = 0.0) -> torch.Tensor:
    """A custom statistic: the share of values above a limit, per sample."""
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
        gradient = run.slot("head", of=pass_).value(0)
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
