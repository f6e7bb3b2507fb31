"""Previews: their content, compared with numpy, and when they are taken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import comgra_decl as comgra
from comgra_decl.errors import DamagedRunError, SpecError, UnknownNameError
from comgra_decl.query import Preview
from comgra_decl.records import PREVIEW_BYTES
from comgra_decl.store.verify import verify
from tests.store.test_damage import change_json
from tests.support.shortened import shortened
from tests.support.traced import traced, train

OUTPUTS = {"all": {"select": "**", "capture": ["input", "output", "output_grad"]}}
WEIGHTS = {"weights": {"select": "**", "capture": ["parameter", "parameter_grad"]}}


def pooled(values: NDArray[Any], axis: int, kept: int) -> NDArray[Any]:
    """Means over floor(i n / m) to ceil((i + 1) n / m), the definition of adaptive pooling."""
    size = values.shape[axis]
    parts = [
        values.take(range(i * size // kept, -(-(i + 1) * size // kept)), axis).mean(axis)
        for i in range(kept)
    ]
    return np.stack(parts, axis)


def expected(whole: NDArray[Any], preview: Preview) -> NDArray[Any]:
    result = whole.astype(np.float64)
    for axis, kept in enumerate(preview.values.shape):
        if preview.meanings[axis].how == "mean":
            result = pooled(result, axis, kept)
        else:
            result = result.take(range(kept), axis)
    return result


def images(count: int, *size: int) -> torch.Tensor:
    return torch.rand(count, *size, generator=torch.Generator().manual_seed(0))


class Attending(nn.Module):
    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.softmax(-1)


class TestContents:
    @pytest.mark.parametrize(
        ("size", "axes"),
        [
            ((3, 8, 8), ("channel", "height", "width")),
            ((3, 29, 40), ("channel", "height", "width")),
            ((50, 7), ("position", "feature")),
            ((130, 70), ("position", "feature")),
            ((2000,), ("feature",)),
        ],
    )
    def test_it_equals_numpy(self, tmp_path: Path, size: tuple[int, ...], axes: Any) -> None:
        x = images(12, *size)
        model = nn.Sequential(nn.Identity(), nn.Flatten(), nn.Linear(x[0].numel(), 2))
        run = traced(tmp_path, OUTPUTS, lambda: train(model, x), preview={"every": 1})
        preview = run.slot("0").preview(0)
        assert preview.axes == ("sample", *axes)
        assert preview.values.nbytes <= PREVIEW_BYTES
        assert preview.meanings[0].size == 12
        assert [axis.size for axis in preview.meanings[1:]] == [*size]
        np.testing.assert_allclose(preview, expected(x.numpy(), preview), rtol=1e-5)

    def test_gradients_and_parameters_have_one(self, tmp_path: Path) -> None:
        model = nn.Conv2d(3, 64, 3)
        before = model.weight.detach().clone().numpy()
        nodes = {**OUTPUTS, **WEIGHTS}
        run = traced(tmp_path, nodes, lambda: train(model, images(4, 3, 20, 20)))
        weight = run.slot("Conv2d", role="weight")
        assert weight.preview(0).axes == ("out", "in", "height", "width")
        np.testing.assert_array_equal(weight.preview(0), expected(before, weight.preview(0)))
        assert weight.grad.preview(0).axes == ("out", "in", "height", "width")
        assert set(run.slot("Conv2d").grad.preview(0).pooled) == {"height", "width"}

    def test_attention_keeps_heads_apart(self, tmp_path: Path) -> None:
        x = images(2, 4, 64, 64)
        model = nn.Sequential(Attending(), nn.Linear(64, 1))
        run = traced(tmp_path, OUTPUTS, lambda: train(model, x))
        preview = run.slot("0").preview(0)
        assert preview.axes == ("sample", "channel", "height", "width")
        named = {"all": {**OUTPUTS["all"], "axes": ["head", "query", "key"]}}
        run = traced(tmp_path, named, lambda: train(model, x))
        preview = run.slot("0").preview(0)
        assert preview.axes == ("sample", "head", "query", "key")
        assert preview.values.shape[:2] == (1, 4)
        np.testing.assert_allclose(preview, expected(x.softmax(-1).numpy(), preview), rtol=1e-5)

    def test_later_writes_do_not_change_it(self, tmp_path: Path) -> None:
        x = images(2, 1500) - 0.5
        model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), nn.Linear(1500, 1))
        run = traced(tmp_path, OUTPUTS, lambda: train(model, x.clone()))
        np.testing.assert_array_equal(
            run.slot("0").preview(0), expected(x.numpy(), run.slot("0").preview(0))
        )

    def test_ids_are_not_averaged(self, tmp_path: Path) -> None:
        tokens = torch.arange(6 * 900).reshape(6, 900) % 97
        model = nn.Sequential(nn.Embedding(97, 4), nn.Linear(4, 1))
        run = traced(tmp_path, OUTPUTS, lambda: train(model, tokens))
        preview = run.slot("0", role="input").preview(0)
        assert preview.values.dtype == np.int64
        assert preview.axes == ("sample", "position")
        np.testing.assert_array_equal(preview, tokens[:1, : preview.values.shape[1]])

    def test_values_come_before_previews(self, tmp_path: Path) -> None:
        x = images(4, 30)
        nodes = {"all": {"select": "**", "capture": ["output"], "values": True}}
        run = traced(tmp_path, nodes, lambda: train(nn.Sequential(nn.Linear(30, 5)), x))
        preview = run.slot("0").preview(0)
        assert preview.whole
        np.testing.assert_array_equal(preview, run.slot("0").value(0))


class TestWhen:
    def test_every_fiftieth_record_has_one(self, tmp_path: Path) -> None:
        model = nn.Linear(4, 4)
        run = traced(tmp_path, OUTPUTS, lambda: train(model, images(4, 4), steps=105))
        steps = [run.slot("Linear").preview(step).step for step in (0, 49, 50, 104)]
        assert steps == [0, 0, 50, 100]

    def test_the_first_four_records_have_those_of_inputs_and_targets(self, tmp_path: Path) -> None:
        model = nn.Linear(4, 4)
        run = traced(tmp_path, OUTPUTS, lambda: train(model, images(4, 4), steps=7))
        given = run.slots[run.slots["kind"] == "input"].iloc[0]
        slot = run.slot(given["node"], role=given["role"])
        assert [slot.preview(step).step for step in range(7)] == [0, 1, 2, 3, 3, 3, 3]
        assert {run.slot("Linear").preview(step).step for step in range(7)} == {0}

    def test_the_spec_switches_them_off(self, tmp_path: Path) -> None:
        model = nn.Linear(4, 4)
        run = traced(tmp_path, OUTPUTS, lambda: train(model, images(4, 4)), preview=False)
        with pytest.raises(UnknownNameError, match="neither values nor previews"):
            run.slot("Linear").preview(0)

    @pytest.mark.parametrize("axes", [["sample", "x"], ["x", "x"], ["<b>"]])
    def test_impossible_axes_are_refused(self, axes: Sequence[str]) -> None:
        with pytest.raises(SpecError, match="axes"):
            comgra.load_spec({"nodes": {"all": {"select": "**", "axes": axes}}})


@pytest.mark.parametrize(("disk", "in_all"), [("10GB", True), ("300kB", False)])
def test_previews_leave_room_in_the_disk_budget(tmp_path: Path, disk: str, in_all: bool) -> None:
    net = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(6)))
    run = traced(
        tmp_path,
        OUTPUTS,
        lambda: train(net, images(8, 3, 16, 16), steps=60),
        preview={"every": 1},
        schedule={"first": 1_000_000, "budget": {"disk": disk}},
    )
    newest = run.slot("0").preview(int(run.steps[-1])).step
    assert (newest == run.steps[-1]) == in_all
    assert ("previews" in run.report["refused"]) != in_all
    if not in_all:
        files = [path for path in Path(str(run.path)).rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) <= 300_000


@pytest.mark.parametrize("records", shortened([50, 100], tried=1))
def test_from_fifty_records_on_they_at_most_double_a_run(tmp_path: Path, records: int) -> None:
    x = images(4, 3, 32, 32)

    def size(**spec: Any) -> int:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(6)), nn.Tanh())
        nodes = {**OUTPUTS, **WEIGHTS}
        run = traced(tmp_path, nodes, lambda: train(net, x, steps=records), **spec)
        files = [path for path in Path(str(run.path)).rglob("*") if path.is_file()]
        return sum(path.stat().st_size for path in files)

    assert size(preview=False) < size() <= 2 * size(preview=False)


def test_training_is_the_same(tmp_path: Path) -> None:
    def training() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Dropout(), nn.Flatten(), nn.Linear(288, 3))
        train(model, images(8, 1, 8, 8), steps=6)
        return [*model.parameters(), torch.rand(3)]

    plain = training()
    found: list[torch.Tensor] = []
    nodes = {**OUTPUTS, **WEIGHTS}
    traced(tmp_path, nodes, lambda: found.extend(training()), preview={"every": 1})
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))


@pytest.mark.parametrize(
    "broken",
    [
        [[["height", "eval", 4]], [0]],
        [[["height", "mean", 1 << 70]], [0]],
        [[["height", "all", 4]], "0"],
        "everything",
    ],
)
def test_a_broken_index_is_damage(tmp_path: Path, broken: Any) -> None:
    model = nn.Linear(4, 4)
    run = traced(tmp_path, OUTPUTS, lambda: train(model, images(4, 4)))
    assert run.path is not None
    key = "steps/000000000000.json"
    change_json(Path(str(run.path)), key, previews=[[0, {"raw/float32/4": [broken]}]])
    again = comgra.open_run(run.path)
    with pytest.raises(DamagedRunError):
        again.slot("Linear").preview(0)
    assert any("values" in each.lost for each in verify(run.path).damages)
