"""Every record has the shapes of its own tensors, as an independent hook confirms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Run, open_run

SPEC = {
    "nodes": {
        "all": {
            "select": "**",
            "capture": ["input", "output", "output_grad", "parameter", "parameter_grad"],
        }
    },
    "schedule": {"first": 1000},
}

Seen = list[dict[str, tuple[int, ...]]]


class Words(nn.Module):
    """Reads sequences of any length; for a single step, it omits the time dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.squeeze = nn.Identity()
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.squeeze(self.embed(tokens).squeeze(1))
        answer: torch.Tensor = self.head(hidden)
        return answer if answer.dim() == 2 else answer.mean(1)


def folder(root: Path) -> dict[str, Any]:
    return {"root": str(root), "group": "g", "name": "r"}


def train(model: nn.Module, sizes: list[tuple[int, int]], *, first: int = 0) -> Seen:
    """Trains on batches of these sizes [samples, tokens]; returns what its hooks saw."""
    seen: Seen = []
    hooks = [
        module.register_forward_hook(
            lambda _m, _a, out, name=name: seen[-1].update({name: tuple(out.shape)})
        )
        for name, module in model.named_modules()
        if name
    ]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(first)
    for samples, tokens in sizes:
        seen.append({})
        batch = torch.randint(11, (samples, tokens), generator=generator)
        labels = torch.randint(3, (samples,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()
    for hook in hooks:
        hook.remove()
    return seen


def sizes_of(steps: int, seed: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    return [(int(rng.choice([1, 4, 4, 4, 7])), int(rng.integers(1, 6))) for _ in range(steps)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Seen]:
    """300 steps, of which 256 form a block; then 40 from a program that resumes the run."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("shapes")
    model = Words()
    sizes = sizes_of(340, 5)
    with comgra.trace({**SPEC, "run": folder(root)}):
        seen = train(model, sizes[:300])
    resumed = {**folder(root), "resume": True, "resume_step": 300}
    with comgra.trace({**SPEC, "run": resumed}):
        seen += train(model, sizes[300:], first=300)
    return open_run(root / "g" / "r"), seen


@pytest.mark.slow
def test_the_shapes_of_outputs_over_all_steps(trained: tuple[Run, Seen]) -> None:
    run, seen = trained
    for node in ("embed", "squeeze", "head"):
        told = run.slot(node).shapes()
        assert told.index.tolist() == list(range(340))
        assert told.tolist() == [step[node] for step in seen]
        assert run.slot(node, of="grad").shapes().tolist() == told.tolist()
    assert len({len(shape) for shape in run.slot("squeeze").shapes()}) == 2
    assert run.reshaped


@pytest.mark.slow
def test_the_shapes_of_one_step(trained: tuple[Run, Seen]) -> None:
    run, seen = trained
    for step in (0, 1, 7, 255, 256, 299, 300, 339):
        shapes = run.shapes(step)
        assert shapes.index.tolist() == run.row(step).index.tolist()
        for node, shape in seen[step].items():
            assert run.slot(node).shape(step) == shape
            assert set(shapes.xs(node, level="node").xs("output", level="role")) == {shape}
    assert set(run.slot("head", role="weight").shapes()) == {(3, 6)}


@pytest.mark.slow
def test_what_was_not_recorded_has_no_shape(trained: tuple[Run, Seen]) -> None:
    run, _ = trained
    with pytest.raises(UnknownNameError, match="step 1000 was not recorded"):
        run.slot("head").shape(1000)


def test_values_have_the_shape_that_their_record_tells(tmp_path: Path) -> None:
    spec: dict[str, Any] = {
        "nodes": {"all": {"select": "**", "capture": ["output"], "values": True}},
        "samples": {"count": 16},
        "schedule": {"first": 100},
        "run": folder(tmp_path),
    }
    torch.manual_seed(0)
    with comgra.trace(spec):
        train(Words(), sizes_of(20, 6))
    run = open_run(tmp_path / "g" / "r")
    shapes = run.slot("squeeze").shapes()
    for step, shape in zip(shapes.index.tolist(), shapes.tolist(), strict=True):
        assert run.value("squeeze", step).shape == shape


@pytest.mark.slow
def test_chunks_tell_the_same_as_series(trained: tuple[Run, Seen]) -> None:
    run, _ = trained
    told: dict[int, list[Any]] = {}
    for chunk in run.chunks():
        assert chunk.shape_codes is not None
        for codes in chunk.shape_codes:
            for slot, code in enumerate(codes.tolist()):
                shape = chunk.slots[slot].shape if code == 0 else None
                told.setdefault(slot, []).append(chunk.shapes[int(code) - 1] if code else shape)
    slots = run.slots
    for number, line in enumerate(slots.to_dict("records")):
        where = {"role": line["role"], "of": line["pass"], "iteration": line["iteration"]}
        series: pd.Series[Any] = run.slot(line["node"], **where).shapes()
        assert series.tolist() == told[number]


def test_a_run_whose_shapes_never_change_says_so(tmp_path: Path) -> None:
    with comgra.trace({**SPEC, "run": folder(tmp_path)}):
        train(Words(), [(4, 3)] * 5)
    run = open_run(tmp_path / "g" / "r")
    assert not run.reshaped
    assert set(run.slot("embed").shapes()) == {(4, 3, 6)}
