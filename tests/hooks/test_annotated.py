"""Tensors that the program names become separate nodes, whatever they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import comgra_decl as comgra
from tests.support.recording import recording
from tests.support.traced import roles, traced, train

LAYERS = {"all": {"select": "linear*", "values": True}}


class Net(nn.Module):
    """Two layers, with `said` called in between."""

    def __init__(self, said: Any = lambda h: comgra.node(h, "hidden")) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.linear2 = nn.Linear(4, 2)
        self.said = said

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.linear1(x))
        self.said(h)
        return self.linear2(h)


def test_a_run_holds_value_gradient_and_edges_of_a_named_tensor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(5, 3)
    hidden = torch.relu(net.linear1(x))
    (gradient,) = torch.autograd.grad(net.linear2(hidden).square().sum(), [hidden])
    run = traced(tmp_path, LAYERS, lambda: train(net, x), samples={"count": 5})
    np.testing.assert_array_equal(run.value("hidden", 0), hidden.detach().numpy())
    np.testing.assert_array_equal(run.slot("hidden", of="grad").value(0), gradient.numpy())
    assert {("linear1", "hidden"), ("hidden", "linear2")} <= {*run.edges()}
    assert ("linear1", "linear2") not in run.edges()
    assert run.slots.kind[run.slots.node == "hidden"].unique() == ["computed"]


def test_several_tensors_share_a_node_by_role_and_a_name_again_is_an_iteration() -> None:
    def said(h: torch.Tensor) -> None:
        comgra.node(h, "cell", role="state")
        comgra.node(h * 2, "cell", role="gate")
        comgra.node(h * 3, "cell", role="gate")

    with recording({"nodes": LAYERS}) as run:
        train(Net(said), torch.randn(2, 3))
    named = {(key.role, key.iteration) for key in run.slots if key.node == "cell"}
    assert named == {("state", 0), ("gate", 0), ("gate", 1)}


def test_what_a_decorated_function_returns_is_named() -> None:
    class Pair(NamedTuple):
        left: torch.Tensor
        rest: list[torch.Tensor]

    @comgra.node("pair")
    def pair(h: torch.Tensor) -> Pair:
        return Pair(h * 2, [h * 3])

    with recording({"nodes": LAYERS}) as run:
        train(Net(pair), torch.randn(2, 3))
    assert run.has("pair", "output.left")
    assert run.has("pair", "output.rest[0]")


@pytest.mark.parametrize(
    "make",
    [
        lambda h: h.argmax(1),
        lambda h: h > 0,
        lambda h: torch.complex(h, h),
        lambda h: h.sum(1),
        lambda h: h.mean(),
        lambda h: h.reshape(2, 4, 5).transpose(1, 2).reshape(10, 4),
        lambda h: h.to(torch.bfloat16),
        lambda h: h[:0],
        lambda h: h.int(),
    ],
    ids="integer mask complex vector scalar merged bfloat16 empty int32".split(),
)
def test_tensors_of_any_dtype_and_shape_can_be_named(make: Any) -> None:
    seen: list[torch.Tensor] = []
    with recording({"nodes": LAYERS}) as run:
        train(Net(lambda h: seen.append(comgra.node(make(h), "odd"))), torch.randn(10, 3), steps=1)
    assert run.faults == []
    assert run.report["refused"] == {}
    (tensor,) = seen
    total = tensor.detach().abs() if tensor.is_complex() else tensor.detach().double()
    assert run.total("odd") == pytest.approx(total.sum().item(), rel=1e-5)


def test_one_tensor_under_two_names_is_chained(tmp_path: Path) -> None:
    def said(h: torch.Tensor) -> None:
        comgra.node(comgra.node(h, "first"), "second")

    run = traced(tmp_path, LAYERS, lambda: train(Net(said), torch.randn(4, 3)))
    edges = {*run.edges()}
    assert {("linear1", "first"), ("first", "second"), ("second", "linear2")} <= edges
    assert ("first", "linear2") not in edges


def test_kinds_are_those_that_were_said(tmp_path: Path) -> None:
    net, scale = Net(), torch.tensor(2.0, requires_grad=True)
    optimizer = torch.optim.SGD([*net.parameters(), scale], lr=0.1)

    def training() -> None:
        for _ in range(3):
            x = comgra.node(torch.randn(4, 3), "image", kind="input")
            y = comgra.node(torch.tensor([0, 1, 1, 0]), "label", kind="target")
            factor = comgra.node(scale, "scale", kind="parameter")
            loss = comgra.node(F.cross_entropy(net(x) * factor, y), "objective", kind="loss")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = traced(tmp_path, LAYERS, training)
    kinds = dict(zip(run.slots.node, run.slots.kind, strict=True))
    named = {name: kinds[name] for name in ("image", "label", "scale", "objective")}
    assert named == {
        "image": "input",
        "label": "target",
        "scale": "parameter",
        "objective": "loss",
    }
    assert run.slots.batch_dim[run.slots.node == "image"].tolist() == [0]
    edges = {*run.edges()}
    assert {("image", "linear1"), ("label", "objective"), ("scale", "prediction")} <= edges
    assert ("prediction", "objective") in edges  # the loss receives the model's output, scaled
    assert run.slot("scale", of="grad").series("mean").notna().all()
    assert scale._backward_hooks is None or len(scale._backward_hooks) == 0


def test_a_program_without_any_module_is_recorded_by_its_names(tmp_path: Path) -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def training() -> None:
        for _ in range(3):
            x = comgra.node(torch.arange(12.0).reshape(4, 3), "x", kind="input")
            comgra.node((x * weight).sum(1), "y").sum().backward()
            optimizer.step()

    run = traced(tmp_path, {}, training)
    assert len(run.steps) == 3
    assert ("x", "y") in run.edges()
    np.testing.assert_allclose(run.series("y", "mean")[0], np.arange(12).sum() / 4)


def test_entries_say_what_to_capture_of_which_names() -> None:
    def said(h: torch.Tensor) -> None:
        comgra.node(h, "attn_weights")
        comgra.node(h, "attn_secret")
        comgra.node(h, "other")

    entry = {"select": {"annotation": "attn*"}, "exclude": {"annotation": "*secret"}}
    nodes = {**LAYERS, "attn": {**entry, "capture": "output", "values": True, "batch_dim": None}}
    with recording({"nodes": nodes, "annotations": False}) as run:
        train(Net(said), torch.randn(4, 3))
    assert run.value("attn_weights").shape == (1, 4, 4)
    assert not run.has("attn_weights", pass_="grad")
    assert not run.has("attn_secret")
    assert not run.has("other")
    assert run.report["entries"]["attn"] == {
        "matched": 1,
        "fired": 1,
        "written": 1,
        "never_called": [],
    }


def test_an_annotation_that_nothing_carries_is_reported() -> None:
    nodes = {**LAYERS, "a": {"select": {"annotation": "hiden"}}}
    with recording({"nodes": nodes}) as run:
        train(Net(), torch.randn(4, 3))
    (sentence,) = run.report["unmatched"]
    assert sentence.startswith("comgra.nodes.a.select: nothing is annotated 'hiden'")


def test_parts_of_named_tensors_are_roles() -> None:
    entry = {"select": {"annotation": "hidden"}, "split": {"dim": -1, "groups": 2, "name": "half"}}
    with recording({"nodes": {**LAYERS, "h": entry}}) as run:
        train(Net(), torch.randn(4, 3))
    assert run.has("hidden", "output.half 1")
    assert run.has("hidden", "output.half 1", pass_="grad")


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_code_names_nothing_again(reentrant: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(self.inner, x, use_reentrant=reentrant)
            return result

    x = torch.randn(4, 3, requires_grad=True)
    with recording({"nodes": LAYERS}) as run:
        train(Block(), x)
    assert run.faults == []
    assert run.has("hidden")
    assert not run.has("hidden", iteration=1)


def test_what_is_named_inside_a_transform_is_left_out_and_said() -> None:
    def said(h: torch.Tensor) -> None:
        torch.vmap(lambda row: comgra.node(row * 2, "row"))(h)

    with recording({"nodes": LAYERS}) as run:
        train(Net(said), torch.randn(4, 3))
    assert run.faults == []
    assert not run.has("row")
    assert "functorch" in run.report["refused"]["row output"]


def test_evaluation_names_belong_to_the_record_of_the_evaluation() -> None:
    net, x = Net(), torch.randn(4, 3)
    with recording({"nodes": LAYERS}, samples={"count": 0}) as run:
        train(net, x)
        net.eval()
        with torch.no_grad():
            for _ in range(3):
                comgra.node(net(comgra.node(x, "batch", kind="input")), "prediction")
        net.train()
        comgra.node(x, "batch", kind="input")
        train(net, x)
    assert run.faults == []
    assert [step.info.mode for step in run.steps] == ["train", "eval", "train"]
    hidden = [run.has("hidden", step=i) for i in range(3)]
    batch = [run.has("batch", step=i) for i in range(3)]
    assert hidden == [True, True, True]
    assert batch == [False, True, True]
    assert not any(run.has("batch", step=i, iteration=1) for i in range(3))


def test_naming_changes_nothing_of_the_training() -> None:
    def run_once(*, follow: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        net = Net(lambda h: comgra.node(comgra.node(h, "h"), "h2"))
        x = torch.randn(4, 3)
        if follow:
            with recording({"nodes": LAYERS}) as recorded:
                train(net, x, steps=5)
            assert recorded.faults == []
        else:
            train(net, x, steps=5)
        return [*net.parameters()], [p.grad for p in net.parameters()], torch.get_rng_state()

    plain, followed = run_once(follow=False), run_once(follow=True)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], followed[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain[1], followed[1], strict=True))
    assert torch.equal(plain[2], followed[2])


def test_a_name_that_is_also_a_module_is_told_apart(tmp_path: Path) -> None:
    net = Net(lambda h: comgra.node(h, "linear1"))
    run = traced(tmp_path, LAYERS, lambda: train(net, torch.randn(4, 3)))
    assert roles(run, "linear1") == ["output"]
    assert roles(run, "linear1#2") == ["output"]
    assert roles(run, "linear1#2", "grad") == ["output"]


def test_a_named_parameter_is_captured_as_one() -> None:
    weight = torch.ones(4, requires_grad=True)
    nodes = {**LAYERS, "w": {"select": {"annotation": "w"}, "capture": "parameter_grad"}}
    net = Net(lambda _: comgra.node(weight, "w", kind="parameter"))
    net.linear2.register_forward_pre_hook(lambda _m, args: (args[0] * weight,))
    with recording({"nodes": nodes}) as run:
        train(net, torch.randn(2, 3))
    assert run.has("w", pass_="grad")
    assert not run.has("w")


@pytest.mark.parametrize("name", ["a b", "x.y[0]", "*", "ü → ß", "input", "loss", "a/b", "0"])
def test_any_text_can_be_a_name(name: str, tmp_path: Path) -> None:
    run = traced(
        tmp_path, {}, lambda: train(Net(lambda h: comgra.node(h, name, "r")), torch.randn(2, 3))
    )
    assert "r" in roles(run, name)
    assert run.slot(name, role="r").series("mean").notna().all()
