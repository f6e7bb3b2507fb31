"""Slices through a loss equal the losses of models with the parameters at each point."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import ProbeError, SpecError, UnknownNameError
from comgra_decl.hooks.probing.methods import drawn
from comgra_decl.hooks.probing.subject import Drawn
from comgra_decl.spec import load_spec
from comgra_decl.viewer.model.landscapes import landscape
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.panes.landscapes import landscape_card
from tests.probing.test_methods import picture, subject_of

X, LABELS = torch.linspace(-2, 2, 144).reshape(4, 1, 6, 6).sin(), [0, 1, 2, 0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn(self.conv(x)).relu().mean((2, 3)))


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype).eval()


def only(found: Drawn) -> np.ndarray[Any, Any]:
    (each,) = found.maps
    assert not each.per_sample
    return each.values.numpy()


def filter_normalised(model: nn.Module, random: torch.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Return a direction as Li et al. describe it, filter by filter in numpy."""
    found = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().double().numpy()
        along = torch.randn(parameter.shape, generator=random, dtype=torch.float64).numpy()
        for i in range(len(weight)):
            if weight.ndim == 1:
                along[i] = 0
            else:
                along[i] *= np.linalg.norm(weight[i]) / np.linalg.norm(along[i])
        found[name] = along
    return found


def loss_at(model: nn.Module, x: Tensor, moves: list[tuple[float, dict[str, Any]]]) -> float:
    """Load parameters into another model; return its loss."""
    other = copy.deepcopy(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for far, direction in moves:
        for name, along in direction.items():
            state[name] += far * torch.from_numpy(along).to(state[name].dtype)
    other.load_state_dict(state)
    with torch.no_grad():
        return F.cross_entropy(other(x), torch.tensor(LABELS)).item()


def test_a_line_has_the_losses_of_models_with_these_parameters() -> None:
    model, x = net(), X.double()
    found = picture(model, x, LABELS, method="loss_slice", points=5, reach=0.5)
    assert found.facts["coordinates"] == [-0.5, -0.25, 0.0, 0.25, 0.5]
    along = filter_normalised(model, torch.Generator().manual_seed(0))
    wanted = [loss_at(model, x, [(c, along)]) for c in found.facts["coordinates"]]
    np.testing.assert_allclose(only(found), wanted, rtol=1e-12)
    assert found.facts["value"] == only(found)[2] == loss_at(model, x, [])


def test_a_grid_has_two_directions() -> None:
    model, x = net(), X.double()
    found = picture(model, x, LABELS, method="loss_slice", directions=["random"] * 2, points=3)
    random = torch.Generator().manual_seed(0)
    first, second = (filter_normalised(model, random) for _ in range(2))
    wanted = [
        [loss_at(model, x, [(a, first), (b, second)]) for b in (-1, 0, 1)] for a in (-1, 0, 1)
    ]
    np.testing.assert_allclose(only(found), wanted, rtol=1e-12)


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_a_direction_leads_to_the_parameters_in_a_file(tmp_path: Path, ending: str) -> None:
    model, x = net(torch.float32), X
    torch.manual_seed(1)
    other = Net().eval()
    file = tmp_path / f"other.{ending}"
    if ending == "npz":
        arrays: dict[str, Any] = {n: p.detach().numpy() for n, p in other.named_parameters()}
        np.savez(file, **arrays)
    else:
        pytest.importorskip("safetensors.torch").save_file(dict(other.named_parameters()), file)
    found = picture(model, x, LABELS, method="loss_slice", directions=[{"to": str(file)}], points=3)
    assert found.facts["directions"] == [str(file)]
    with torch.no_grad():
        at_file = F.cross_entropy(other(x), torch.tensor(LABELS)).item()
    assert only(found)[1] == loss_at(model, x, [])
    assert only(found)[2] == pytest.approx(at_file, rel=1e-5)


def test_parameters_and_buffers_of_the_copy_are_restored_bit_by_bit_also_after_an_error() -> None:
    model = net(torch.float32).train()
    before = {k: v.numpy().tobytes() for k, v in model.state_dict().items()}
    declared = load_spec(
        {
            "probes": {"eyes": {"samples": {"count": 1}}},
            "pictures": {"it": {"of": "eyes", "method": "loss_slice", "points": 3}},
        }
    )
    subject = subject_of(model, X, LABELS)
    drawn(declared.pictures["it"], subject)
    left = subject.copy.module.state_dict()
    assert {n: v.numpy().tobytes() for n, v in left.items() if "running" not in n} == {
        n: v for n, v in before.items() if "running" not in n and "num_" not in n
    } | {n: v.numpy().tobytes() for n, v in left.items() if "num_" in n}
    calls = 0

    def fails(*_: Any, **__: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("no such kernel")

    subject.rewind = fails
    with pytest.raises(RuntimeError, match="no such kernel"):
        drawn(declared.pictures["it"], subject)
    after = dict(subject.copy.module.named_parameters())
    assert {n: p.detach().numpy().tobytes() for n, p in after.items()} == {
        n: v for n, v in before.items() if n in after
    }


def test_only_the_parameters_of_selected_modules_move() -> None:
    model, x = net(), X.double()
    found = picture(model, x, LABELS, method="loss_slice", select="head", points=3)
    random = torch.Generator().manual_seed(0)
    along = filter_normalised(model.head, random)
    moved = {f"head.{name}": value for name, value in along.items()}
    assert only(found)[0] == pytest.approx(loss_at(model, x, [(-1, moved)]), rel=1e-12)


def _file(folder: Path, **arrays: Any) -> list[dict[str, str]]:
    np.savez(folder / "it.npz", **arrays)
    return [{"to": str(folder / "it.npz")}]


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no file": (lambda f: [{"to": str(f / "no.npz")}], r"no.npz cannot be read as a .npz file"),
    "no name": (
        lambda f: _file(f, weigth=np.ones((3, 4))),
        r"has no 'weight'; did you mean 'weigth'",
    ),
    "no fit": (
        lambda f: _file(f, weight=np.ones((2, 4))),
        r"'weight' has the shape \[2, 4\] in .*, but \[3, 4\] in the model",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_does_not_fit_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    make, why = REFUSED[case]
    model = nn.Linear(4, 3, bias=False)
    with pytest.raises(ProbeError, match=why):
        picture(model, torch.randn(2, 4), [0, 1], method="loss_slice", directions=make(tmp_path))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"points": 20}, "points: must be odd"),
        ({"directions": []}, "directions"),
        ({"plane": "p.npz", "directions": ["random"] * 2}, "plane: determines the directions"),
        ({"plane": "p.npz", "select": "head"}, "plane: determines the directions"),
        ({"directions": [{"to": "weights.pt"}]}, r"a .npz or .safetensors file, got 'weights.pt'"),
    ],
)
def test_a_wrong_declaration_is_refused(wrong: dict[str, Any], why: str) -> None:
    spec = {"method": "loss_slice", "of": "eyes", **wrong}
    with pytest.raises(SpecError, match=why):
        load_spec({"probes": {"eyes": {"samples": {"count": 1}}}, "pictures": {"it": spec}})


def descended(root: Path) -> tuple[comgra.Run, nn.Module, Tensor, Tensor]:
    """Return a run with five checkpoints, its model, inputs and classes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    x, classes = torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3
    spec = {
        "nodes": {"all": {"select": "**"}},
        "schedule": {"first": 100},
        "checkpoints": {"every": 1},
    }
    with comgra.trace(spec, root=root) as session:
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(model(x), classes).backward()
            optimizer.step()
    return comgra.open_run(session.path or ""), model, x, classes


def test_a_plane_has_the_principal_components_of_the_way_to_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    run, model, _, _ = descended(tmp_path)
    names = [name for name, _ in model.named_parameters()]
    rows = [np.concatenate([run.checkpoint(s)[n].ravel() for n in names]) for s in range(5)]
    moves = np.stack(rows) - rows[-1]
    left, singular, right = np.linalg.svd(moves, full_matrices=False)
    plane = run.plane()
    assert plane.steps == (0, 1, 2, 3, 4)
    assert np.abs(plane.coordinates).max() == 1
    np.testing.assert_allclose(plane.explained, singular[:2] ** 2 / (singular**2).sum(), rtol=1e-9)
    scale = np.abs(left[:, :2] * singular[:2]).max()
    wanted = left[:, :2] * singular[:2] / scale
    np.testing.assert_allclose(np.abs(plane.coordinates), np.abs(wanted), atol=1e-9)
    plane.save(tmp_path / "plane.npz")
    with np.load(tmp_path / "plane.npz") as stored:
        axes = [
            np.concatenate([stored[f"{axis}.{name}"].ravel() for name in names])
            for axis in ("first", "second")
        ]
    for axis, component, column in zip(axes, right, plane.coordinates.T, strict=False):
        np.testing.assert_allclose(np.abs(axis), scale * np.abs(component), atol=1e-9)
        np.testing.assert_allclose(moves @ axis / scale**2, column, atol=1e-9)
    assert run.plane([0, 2, 3]).steps == (0, 2, 3)
    with pytest.raises(UnknownNameError, match="2 checkpoints determine no plane"):
        run.plane([0, 1])


@pytest.mark.parametrize("step", [4, 2])
def test_a_slice_in_a_plane_contains_the_way_of_the_training(tmp_path: Path, step: int) -> None:
    run, model, x, classes = descended(tmp_path)
    plane, file = run.plane(), tmp_path / "plane.npz"
    plane.save(file)
    look = comgra.look(
        model.eval(),
        x,
        weights=run.checkpoint(step),
        pictures={"valley": {"method": "loss_slice", "plane": str(file), "points": 5, "reach": 1}},
        loss=lambda output: F.cross_entropy(output, classes),
    )
    found = look.picture("valley", step)
    way = found.facts["way"]
    assert way["steps"] == [*range(5)]
    relative = plane.coordinates - plane.coordinates[step]
    np.testing.assert_allclose(way["coordinates"], relative, atol=1e-9)
    assert found.facts["directions"] == ["first component", "second component"]
    with np.load(file) as stored:
        moves = [
            {n: stored[f"{axis}.{n}"] for n, _ in model.named_parameters()}
            for axis in ("first", "second")
        ]
    other = copy.deepcopy(model)
    other.load_state_dict(run.checkpoint(step).torch())
    for i, j in ((0, 0), (1, 4), (2, 2)):
        at = found.facts["coordinates"]
        moved = copy.deepcopy(other).eval()
        with torch.no_grad():
            for name, parameter in moved.named_parameters():
                for far, along in zip((at[i], at[j]), moves, strict=True):
                    parameter.add_(far * torch.from_numpy(along[name]))
            wanted = F.cross_entropy(moved(x), classes).item()
        assert found.values[0, i, j] == pytest.approx(wanted, rel=1e-9)
    card = landscape(RunView(look), "valley", look.types[-1], step)
    assert card is not None
    assert [each[0] for each in card.way] == [*range(5)]
    row, column = card.way[step][1:]
    assert (row, column) == pytest.approx((0.5, 0.5))  # the step itself, in the middle
    assert landscape_card(card).count("<circle") == 5


def test_another_file_is_no_plane(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", weight=np.ones(3))
    with pytest.raises(ProbeError, match=r"contains no plane; write it with run\.plane\(\)\.save"):
        picture(net(), X.double(), LABELS, method="loss_slice", plane=str(tmp_path / "other.npz"))


def test_a_run_has_the_slices_of_all_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    x, classes = torch.randn(6, 5), torch.arange(6) % 3
    common = {"method": "loss_slice", "of": "eyes", "points": 3}
    spec: dict[str, Any] = {
        "nodes": {"all": {"select": "**"}},
        "schedule": {"first": 100},
        "samples": {"count": 6},
        "probes": {"eyes": {"samples": {"count": 6}, "schedule": {"first": 0, "every": 1}}},
        "pictures": {"line": common, "grid": {**common, "directions": ["random", "random"]}},
    }
    losses = []
    with comgra.trace(spec, root=tmp_path) as session:
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), classes)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert session.path is not None
    run = comgra.open_run(session.path)
    line, grid = run.picture("line"), run.picture("grid", 1)
    assert line.axes == ("step", "first direction")
    assert line.labels == {"step": [0, 1], "first direction": [-1.0, 0.0, 1.0]}
    np.testing.assert_allclose(line.values[:, 1], losses, rtol=1e-6)
    assert grid.values.shape == (1, 3, 3)
    assert grid.values[0, 1, 1] == pytest.approx(losses[1], rel=1e-6)
