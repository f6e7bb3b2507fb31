"""Tensors are split into roles, and each part is what slicing returns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from comgra_decl.hooks.tensors.splitting import MOST_PARTS, take_apart
from comgra_decl.spec.functions import SplitSpec
from tests.support.recording import recording
from tests.support.traced import roles, traced, train


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    data=st.data(),
    grouped=st.booleans(),
)
def test_parts_are_the_slices_and_keep_the_batch(
    shape: tuple[int, ...], data: st.DataObject, grouped: bool
) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    batch = data.draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    size = shape[dim]
    groups = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    whole = np.arange(np.prod(shape)).reshape(shape)
    spec = SplitSpec(dim=dim, name="p", groups=groups if grouped else None)
    parts = take_apart(torch.from_numpy(whole), spec, batch_dim=batch)
    if grouped:
        expected = np.split(whole, groups, axis=dim)
    else:
        expected = [np.asarray(whole.take(i, axis=dim)) for i in range(size)]
    assert [part.label for part in parts] == [f"p {i}" for i in range(len(expected))]
    for part, slice_ in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(part.tensor.numpy(), slice_)
        if (
            batch is not None
            and part.batch_dim is not None
            and batch % len(shape) != dim % len(shape)
        ):
            assert slice_.shape[part.batch_dim] == shape[batch]
        if batch is None:
            assert part.batch_dim is None


@pytest.mark.parametrize(
    ("split", "problem"),
    [
        ({"dim": 3}, "it has no dimension 3, its shape is (4, 66)"),
        ({"dim": 1}, f"there would be 66 parts; the maximum is {MOST_PARTS}"),
        ({"dim": 1, "groups": 4}, "66 elements cannot be divided into 4 equal groups"),
    ],
)
def test_what_cannot_be_taken_apart_stays_whole_and_is_said(
    split: dict[str, int], problem: str
) -> None:
    entry = {"select": "0", "split": {"name": "head", **split}}
    with recording({"nodes": {"wide": entry}}) as run:
        train(nn.Sequential(nn.Linear(3, 66)), torch.randn(4, 3))
    assert run.faults == []
    assert run.has("0", "output")
    assert run.has("0", "output", pass_="grad")
    assert not any(".head" in key.role for key in run.slots)
    (reason,) = run.report["refused"].values()
    assert reason.startswith(problem)


def test_a_run_holds_parts_of_values_and_of_gradients(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 6)), torch.randn(4, 3)
    out = model[0](x)
    (gradient,) = torch.autograd.grad(out.square().sum(), [out])
    split = {"dim": -1, "groups": 3, "name": "head"}
    nodes = {"heads": {"select": "0", "values": True, "split": split}}
    run = traced(tmp_path, nodes, lambda: train(model, x))
    parts = ["output.head 0", "output.head 1", "output.head 2"]
    assert roles(run, "0") == ["output", *parts]
    assert roles(run, "0", "grad") == ["output", *parts]
    for index, role in enumerate(parts):
        columns = slice(2 * index, 2 * index + 2)
        value = run.slot("0", role=role).value(0)
        np.testing.assert_array_equal(value, out.detach()[:, columns])
        gradient_of_part = run.slot("0", role=role, of="grad").value(0)
        np.testing.assert_array_equal(gradient_of_part, gradient[:, columns])
        expected = out.detach()[:, columns].numpy().mean(1).mean()
        assert run.slot("0", role=role).series("mean")[0] == pytest.approx(expected, rel=1e-5)


def test_inputs_are_taken_apart_like_outputs() -> None:
    entry = {"select": "0", "capture": "input", "split": {"dim": 1, "name": "token"}}
    with recording({"nodes": {"x": entry}}) as run:
        train(nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3))
    assert run.has("0", "input.token 2")


def test_in_place_changes_of_what_was_taken_apart_are_still_allowed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).mul_(2).add_(1)

    model, x = Net(), torch.randn(4, 3)
    expected = model.linear(x).detach().numpy()
    entry = {"select": "linear", "values": True, "split": {"dim": 1, "name": "unit"}}
    with recording({"nodes": {"units": entry}}) as run:
        train(model, x)
    assert run.faults == []
    np.testing.assert_array_equal(run.value("linear", "output.unit 3"), expected[:, 3])
