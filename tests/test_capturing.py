"""Everything that modules and optimizers hold, from the declaration to `open_run`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import comgra_decl as comgra
from comgra_decl.spec.nodes import CaptureName

STEPS = 4


class Block(nn.Module):
    """A layer whose node has an explicit name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    @comgra.node("mixing")
    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.linear(x))) * scale


class Net(nn.Module):
    """Two blocks between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=torch.full((4,), 0.5))
        return self.head(x)


def train(model: nn.Module) -> dict[str, list[Any]]:
    """Train normally and return the tensors that the loop observed itself."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    seen: dict[str, list[Any]] = {"x": [], "y": [], "raw": [], "used": [], "update": [], "avg": []}
    weight = model.get_parameter("stem.weight")
    for _ in range(STEPS):
        x, y = torch.randn(6, 3), torch.randint(0, 2, (6,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        assert weight.grad is not None
        seen["raw"].append(weight.grad.clone())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        seen["used"].append(weight.grad.clone())
        before = weight.detach().clone()
        optimizer.step()
        seen["update"].append(weight.detach() - before)
        seen["avg"].append(optimizer.state[weight]["exp_avg"].clone())
        seen["x"].append(x)
        seen["y"].append(y)
    return seen


SPEC = {
    "nodes": {
        "stem": {
            "select": {"regex": "st.m"},
            "capture": ["input", "parameter_grad", "parameter_grad_raw", "update"],
            "values": True,
        },
        "state": {"select": {"class": "Linear"}, "capture": "optimizer_state", "values": True},
        "mixing": {"select": {"annotation": "mix*"}, "capture": ["output", "input", "input_grad"]},
        "norms": {"select": "**.norm", "capture": "buffer", "exclude": {"path": "blocks.1.norm"}},
    },
    "schedule": {"first": STEPS},
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, list[Any]]]:
    torch.manual_seed(0)
    model = Net()
    with comgra.trace(SPEC, root=tmp_path_factory.mktemp("runs")) as session:
        seen = train(model)
    assert session.path is not None
    return comgra.open_run(session.path), seen


@pytest.mark.parametrize(
    ("what", "role", "pass_"),
    [
        ("x", "input", "forward"),
        ("raw", "weight", "grad:raw"),
        ("used", "weight", "grad"),
        ("update", "weight", "update"),
        ("avg", "weight.exp_avg", "forward"),
    ],
)
def test_the_run_contains_what_the_training_observed(
    traced: tuple[Any, dict[str, list[Any]]], what: str, role: str, pass_: str
) -> None:
    run, seen = traced
    for step in range(STEPS):
        value = run.slot("stem", role=role, of=pass_).value(step)
        np.testing.assert_array_equal(np.squeeze(value), seen[what][step].numpy())


def test_the_target_is_in_the_run(traced: tuple[Any, dict[str, list[Any]]]) -> None:
    run, seen = traced
    for step in range(STEPS):
        value = run.slot("target", role="target").value(step)
        np.testing.assert_array_equal(value, seen["y"][step].numpy())
    assert ("target", "loss") in run.edges()


def test_a_named_module_is_recorded_under_its_name(
    traced: tuple[Any, dict[str, list[Any]]],
) -> None:
    run, _ = traced
    slots = run.slots[run.slots["node"].isin(["mixing", "blocks.1"])]
    found = set(zip(slots["node"], slots["role"], slots["pass"], strict=True))
    for node in ("mixing", "blocks.1"):  # the first one has this name, the second keeps its path
        assert {(n, r, p) for n, r, p in found if n == node} == {
            (node, "output", "forward"),
            (node, "input", "forward"),
            (node, "input.scale", "forward"),
            (node, "input", "grad"),
        }


def test_buffers_are_nodes_of_their_kind(traced: tuple[Any, dict[str, list[Any]]]) -> None:
    run, _ = traced
    buffers = run.slots[run.slots["kind"] == "buffer"]
    of_norm = buffers[buffers["role"].str.startswith("running")]
    assert set(of_norm["node"]) == {"blocks.0.norm"}
    means = run.slot("blocks.0.norm", role="running_mean").series("abs_mean")
    assert means.iloc[0] == 0.0
    assert (means.iloc[1:] > 0).all()


def test_every_pattern_matched_and_fired(traced: tuple[Any, dict[str, list[Any]]]) -> None:
    run, _ = traced
    assert run.report["unmatched"] == []
    entries = run.report["entries"]
    assert {name: entry["matched"] for name, entry in entries.items()} == {
        "stem": 1,
        "state": 4,
        "mixing": 2,
        "norms": 1,
    }


def test_losses_and_passes_are_read_by_their_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (critic, generator)]
    compare = nn.functional.binary_cross_entropy_with_logits
    spec = {"nodes": {"all": {"select": "**"}}, "schedule": {"first": 100}}
    losses: dict[str, list[float]] = {"loss": [], "loss:loss_g": []}
    with comgra.trace(spec, root=tmp_path) as session:
        for _ in range(3):
            fake = generator(torch.randn(4, 3))
            loss_d = compare(critic(torch.randn(4, 2)), torch.ones(4, 1))
            loss_d = loss_d + compare(critic(fake.detach()), torch.zeros(4, 1))
            loss_d.backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            loss_g = compare(critic(fake), torch.ones(4, 1))
            loss_g.backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            losses["loss"].append(loss_d.item())
            losses["loss:loss_g"].append(loss_g.item())
    assert session.path is not None
    run = comgra.open_run(session.path)
    for node, expected in losses.items():
        recorded = run.series(node).to_numpy(np.float32)
        np.testing.assert_array_equal(recorded, np.asarray(expected, np.float32))
    assert run.slot("Linear", of="grad:loss_g").series("l2").notna().all()  # the generator
    assert {("target", "loss"), ("target", "loss:loss_g")} <= set(run.edges())


def test_the_page_about_capturing_is_complete_and_valid() -> None:
    page = (Path(__file__).parents[1] / "docs" / "capturing.md").read_text()
    examples = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    for example in examples:
        assert set(comgra.load_spec(yaml.safe_load(example)).nodes) == set(
            re.findall(r"^  (\w+):", example, re.MULTILINE)
        )
    assert {f"`{name}`" for name in get_args(CaptureName)} <= set(re.findall("`[a-z_]+`", page))


def test_capturing_everything_changes_nothing(tmp_path: Path) -> None:
    """Frozen layers, dropout, momentum and buffers are bit-identical to those without tracing."""
    capture = (
        "output output_grad input input_grad parameter parameter_grad parameter_grad_raw update "
        "buffer optimizer_state"
    ).split()
    spec = {"nodes": {"all": {"select": "**", "capture": capture}}, "schedule": {"first": 100}}
    ends = []
    for traced in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Net(), nn.Dropout(0.5), nn.Linear(2, 2))
        model[0].get_submodule("stem").requires_grad_(False)
        if traced:
            with comgra.trace(spec, root=tmp_path):
                seen = adversarial(model)
        else:
            seen = adversarial(model)
        ends.append((seen, model))
    (plain, one), (watched, two) = ends
    assert plain == watched
    for (name, a), (_, b) in zip(one.state_dict().items(), two.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    flags = [[p.requires_grad for p in m.parameters()] for m in (one, two)]
    assert flags[0] == flags[1]
    assert all(not p._backward_hooks for p in two.parameters())


def adversarial(model: nn.Module) -> list[float]:
    """Train with two losses per step, noise, clipping, and an optimizer with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        out = model(torch.randn(6, 3))
        loss_a = (out - torch.randn(6, 2)).square().mean()
        loss_b = out.abs().sum()
        loss_a.backward(retain_graph=True)
        loss_b.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses += [loss_a.item(), loss_b.item(), float(torch.rand(()))]
    return losses
