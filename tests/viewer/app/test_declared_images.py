"""Recorded images are shown in their original colours if the spec says how they were normalised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import comgra_decl as comgra
from comgra_decl.errors import SpecError
from comgra_decl.query import Preview, Run
from comgra_decl.records import Axis, Normalised
from comgra_decl.viewer.model.drawing import draw
from tests.query.test_previews import pooled
from tests.support.traced import traced, train

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def normalised(images: NDArray[np.uint8]) -> torch.Tensor:
    """Returns images [n, height, width, 3] as the input of a model, [n, 3, height, width]."""
    scaled = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    return (scaled - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def recorded(root: Path, images: NDArray[np.uint8], **entry: Any) -> Run:
    same = nn.Conv2d(3, 3, 1, bias=False)
    same.weight.data = torch.eye(3)[..., None, None]
    net = nn.Sequential(same, nn.Flatten(), nn.Linear(images[0].size, 1))
    nodes = {"all": {"select": "**", "image": {"mean": MEAN, "std": STD}, **entry}}
    return traced(root, nodes, lambda: train(net, normalised(images), steps=1))


def shown(preview: Preview, sample: int) -> NDArray[np.uint8]:
    """Returns the colours [height, width, 3] that are drawn for a sample."""
    drawing = draw(preview, sample=sample)
    assert drawing.form == "colours"
    assert drawing.rgba is not None
    return drawing.rgba.view(np.uint8).reshape(*drawing.rgba.shape, 4)[..., :3]


def test_inputs_and_outputs_have_their_original_colours(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 12, 10, 3), dtype=np.uint8)
    run = recorded(tmp_path, images, values=True)
    (given,) = set(run.slots.query("kind == 'input'")["role"])
    for slot in (run.slot("input", role=given), run.slot("0")):
        preview = slot.preview(0)
        assert preview.image == Normalised(tuple(MEAN), tuple(STD))
        for sample, image in enumerate(images):
            np.testing.assert_array_equal(shown(preview, sample), image)
    assert run.slot("0").grad.preview(0).image is None


def test_a_preview_has_the_mean_colours_of_its_areas(tmp_path: Path) -> None:
    images = np.random.default_rng(1).integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)
    preview = recorded(tmp_path, images).slot("0").preview(0)
    size = preview.values.shape[-1]
    assert preview.values.shape == (1, 3, size, size)
    assert size < 64
    areas = pooled(pooled(images[0].astype(float), 0, size), 1, size)
    np.testing.assert_allclose(shown(preview, 0), areas, atol=0.51)


def test_numbers_for_other_channels_do_not_apply() -> None:
    axes = tuple(Axis(n, "all", s) for n, s in zip(AXES, (1, 1, 4, 4), strict=True))
    values = np.random.default_rng(2).random((1, 1, 4, 4), np.float32)
    for_three = Preview(0, values, axes, image=Normalised((0.1, 0.2, 0.3), (1.0,)))
    assert draw(for_three, sample=0).form == "map"
    for_all = Preview(0, values, axes, image=Normalised((0.5,), (0.25,)))
    grey = np.rint(np.clip(values[0, 0] * 0.25 + 0.5, 0, 1) * 255)
    np.testing.assert_array_equal(shown(for_all, 0), grey[..., None].repeat(3, -1))


AXES = ("sample", "channel", "height", "width")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({"std": [0.0]}, "must be more than 0"),
        ({"std": [0.2, -1.0, 0.2]}, "must be more than 0"),
        ({"mean": MEAN, "std": STD[:2]}, "mean has 3 numbers and std 2"),
    ],
)
def test_numbers_that_cannot_be_a_normalisation_are_refused(
    image: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        comgra.load_spec({"nodes": {"all": {"select": "**", "image": image}}})
    probe = {"samples": {"count": 1}, "show": {"image": image}}
    with pytest.raises(SpecError, match=message):
        comgra.load_spec({"probes": {"eyes": probe}})


@pytest.mark.parametrize(("count", "fits"), [(1, True), (2, False), (3, True), (4, False)])
def test_numbers_for_other_channels_than_those_of_the_input_are_reported(
    tmp_path: Path, count: int, fits: bool
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 12, 10, 3), dtype=np.uint8)
    image = {"mean": [0.5] * count, "std": [0.25] * count}
    run = recorded(tmp_path, images, image=image)
    expected = f"nodes: `image` has {count} means or standard deviations, but the input [3, 3, 12"
    found = [w for w in run.report["warnings"] if w.startswith(expected)]
    assert len(found) == (0 if fits else 1)


def test_numbers_of_a_probe_for_other_channels_are_reported(tmp_path: Path) -> None:
    spec = {
        "nodes": {"all": {"select": "**"}},
        "probes": {"eyes": {"samples": {"count": 2}, "show": {"image": {"mean": [0.4, 0.5]}}}},
    }
    net = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(2 * 12 * 10, 1))
    with comgra.trace(spec, root=tmp_path) as session:
        train(net, torch.rand(2, 3, 12, 10), steps=1)
    assert session.path is not None
    warnings = comgra.open_run(session.path).report["warnings"]
    assert [w for w in warnings if w.startswith("probe 'eyes': show: `image` has 2 means")]
