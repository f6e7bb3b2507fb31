"""Raw values are shown, listed and exported exactly as they were recorded."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

import comgra_decl
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.model.sheet import (
    COLUMNS,
    LISTED,
    PHOTO,
    PIXELS,
    ROWS,
    Tensor,
    listing_of,
    picture_of,
    tensor_of,
    text_of,
    window_of,
)
from comgra_decl.viewer.model.slicing import Slicing, slicing_for, taken
from comgra_decl.viewer.model.takeaway import csv_of, npy_of, tabbed
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.sheet import SheetPane
from tests.support.fake_run import FakeRun
from tests.viewer.app.conftest import BROKEN_FROM

SHAPES = st.lists(st.integers(1, 7), max_size=5).map(tuple)


def at(view: RunView, **fields: object) -> Selection:
    return resolve(view, Selection(**fields), {})  # type: ignore[arg-type]


def recorded(fake: FakeRun, node: str, step: int) -> np.ndarray:
    slot = next(s for s in fake.slots if s.key == (node, "output", 0, "forward"))
    return fake.tensor(slot, step)[[0, 4, 8, 12]]


def tensor(values: Any, **fields: Any) -> Tensor:
    return Tensor(np.asarray(values), (), **fields)


@given(SHAPES, st.text("yxc0123,;-\u00b2", max_size=14), st.data())
def test_any_text_gives_cells_of_any_shape(
    shape: tuple[int, ...], text: str, data: st.DataObject
) -> None:
    fixed = data.draw(st.none() | st.integers(0, shape[0] - 1)) if shape else None
    slicing = slicing_for(text, shape, fixed=fixed)
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    cells = taken(values, slicing)
    assert cells.ndim in (2, 3)
    assert set(cells.ravel()) <= set(values.ravel())
    assert slicing_for(slicing.text, shape, fixed=fixed) == slicing
    if fixed is not None:
        assert slicing.places[0] == fixed


@pytest.mark.parametrize("text", ["1,y,2,x", "x,1,y,0", "0,0,0,y", "x,2,2,2"])
def test_a_slice_is_what_numpy_says(text: str) -> None:
    values = np.random.default_rng(0).normal(size=(3, 4, 5, 6))
    places = text.split(",")
    plain = values[tuple(slice(None) if p in "xy" else int(p) for p in places)]
    if "x" not in places:
        expected = plain[:, None]
    elif "y" not in places:
        expected = plain[None]
    else:
        expected = plain if places.index("y") < places.index("x") else plain.T
    np.testing.assert_array_equal(taken(values, slicing_for(text, values.shape)), expected)


def test_an_axis_moves_from_one_dim_to_another() -> None:
    slicing = slicing_for("", (2, 3, 4))
    assert slicing.text == "0,y,x"
    assert slicing.put(0, "x").text == "x,y,0"
    assert slicing.put(1, "x").text == "0,x,y"
    assert slicing.put(1, 2).text == "0,2,x"
    assert slicing_for(Slicing((0, 0, 0)).text, (2, 3, 4)).text == "0,y,x"


def test_all_samples_or_one(fake: FakeRun, view: RunView) -> None:
    expected = recorded(fake, "embed", 4)
    everything = tensor_of(view, at(view, node="embed", step=4), "forward")
    np.testing.assert_array_equal(everything.values, expected)
    assert [dim.name for dim in everything.dims] == ["sample", "dim 1", "dim 2"]
    one = tensor_of(view, at(view, node="embed", step=4, batch="3"), "forward")
    window = window_of(one, one.slicing(""), "")
    np.testing.assert_array_equal(window.cells, expected[3][:ROWS, :COLUMNS])
    np.testing.assert_array_equal(np.load(io.BytesIO(npy_of(one))), expected[3])


@given(
    arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 40)),
        elements=st.floats(width=32),
    ),
    st.sampled_from(["high", "low", "largest", "smallest"]),
)
def test_a_list_is_in_order_and_names_each_place(values: np.ndarray, order: str) -> None:
    listing = listing_of(tensor(values), order, "0", whole=True)
    places = [tuple(index) for index in listing.indices.tolist()]
    assert len(set(places)) == values.size == listing.total
    np.testing.assert_array_equal([values[place] for place in places], listing.values)
    finite = np.isfinite(listing.values)
    assert (np.diff(finite.astype(int)) >= 0).all()  # non-finite values come first
    keys = listing.values[finite].astype(np.float64)
    keys = np.abs(keys) if order in ("largest", "smallest") else keys
    assert (np.diff(keys if order in ("low", "smallest") else -keys) >= 0).all()


def test_huge_tensors_come_in_windows() -> None:
    values = np.random.default_rng(1).normal(size=(900, 700)).astype(np.float32)
    huge = tensor(values)
    window = window_of(huge, slicing_for("", values.shape), "890,77")
    assert (window.row, window.column) == (900 - ROWS, 77)
    np.testing.assert_array_equal(window.cells, values[-ROWS:, 77 : 77 + COLUMNS])
    picture = picture_of(huge, slicing_for("", values.shape))
    assert picture.image.size <= PIXELS
    h, w = picture.block
    corner = values[:h, :w]
    assert picture.image[0, 0] == corner.flat[np.abs(corner).argmax()]
    assert np.abs(picture.image).max() == np.abs(values).max()
    page = listing_of(huge, "high", "250")
    np.testing.assert_array_equal(page.values, np.sort(values.ravel())[::-1][250 : 250 + LISTED])


def test_what_is_not_finite_is_marked_and_never_hidden_by_a_block() -> None:
    values = np.ones((400, 300))
    values[399, 299], values[7, 7] = np.nan, -np.inf
    picture = picture_of(tensor(values), slicing_for("", values.shape))
    assert picture.marks.sum() == 2
    assert picture.marks[-1, -1]
    assert picture.limit == 1.0


def test_three_channels_are_colours() -> None:
    values = np.random.default_rng(2).integers(0, 256, (2, 3, 16, 12)).astype(np.uint8)
    photo = tensor(values, fixed=1, picture=True)
    slicing = photo.slicing("")
    assert slicing.text == "1,c,y,x"
    rgba = picture_of(photo, slicing).rgba
    assert rgba is not None
    channels = np.ascontiguousarray(rgba).view(np.uint8).reshape(16, 12, 4)
    np.testing.assert_array_equal(channels[..., :3], values[1].transpose(1, 2, 0))
    large = picture_of(tensor(np.zeros((3, 900, 900))), slicing_for("c,y,x", (3, 900, 900))).rgba
    assert large is not None
    assert large.size <= PHOTO


def test_bytes_spell_a_text() -> None:
    assert text_of(tensor(np.frombuffer(b"to be\nor not\0\0", np.uint8))) == "to be\nor not"
    assert text_of(tensor(np.array([1, 2, 200], np.uint8))) == ""
    assert text_of(tensor(np.array([65, 66]))) == ""


def test_files_hold_every_digit() -> None:
    values = np.array([[0.1, np.nan, -np.inf], [1e-30, 3.0, 16777217.0]], np.float32)
    slicing = slicing_for("", values.shape)
    head, *lines = csv.reader(io.StringIO(csv_of(tensor(values), slicing, "").decode()))
    assert head == ["", "0", "1", "2"]
    read = np.array([line[1:] for line in lines], np.float32)
    np.testing.assert_array_equal(read, values)
    assert (
        tabbed(window_of(tensor(values), slicing, "")).decode().split("\n")[0] == "0.1\tnan\t-inf"
    )
    listed = csv_of(tensor(values), slicing, "low").decode().splitlines()
    assert [line.rpartition(",")[2] for line in listed[1:3]] == ["nan", "-inf"]
    small = tensor(np.array([1.5, -2.0], ml_dtypes.bfloat16))
    np.testing.assert_array_equal(
        np.load(io.BytesIO(npy_of(small))), np.array([1.5, -2.0], np.float32)
    )


@pytest.mark.parametrize("dtype", [bool, np.int64, np.complex64, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 3, 4, 5, 6)])
def test_every_dtype_and_rank_can_be_drawn(dtype: Any, shape: tuple[int, ...]) -> None:
    values = np.ones(shape).astype(dtype)
    some = tensor(values)
    slicing = some.slicing("")
    assert np.isfinite(picture_of(some, slicing).image).all()
    assert len(listing_of(some, "high", "").values) == min(values.size, LISTED)
    assert csv_of(some, slicing, "")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(4, 6)
        self.wide = nn.Linear(6, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.small(x))


def traced(root: Path, spec: dict[str, Any]) -> RunView:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with comgra_decl.trace(spec, root=root) as session:
        for _ in range(2):
            net(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    assert session.path is not None
    return RunView(comgra_decl.open_run(session.path))


def test_missing_values_name_the_line_that_records_them(tmp_path: Path) -> None:
    import yaml

    capture = ["output", "output_grad", "parameter", "parameter_grad", "update"]
    spec: dict[str, Any] = {
        "nodes": {"all": {"select": "**", "capture": capture}},
        "values": {"max_elements": 40},
    }
    view = traced(tmp_path / "a", spec)
    wanted = []
    for role in ("output", "weight"):
        for pass_ in ("forward", "grad", *(["update"] if role == "weight" else [])):
            missing = tensor_of(view, at(view, node="small", role=role), pass_).missing
            assert missing is not None
            wanted.append(yaml.safe_load(missing.spec)["nodes"])
    nodes = {f"{name}{i}": entry for i, one in enumerate(wanted) for name, entry in one.items()}
    wide = traced(tmp_path / "b", {**spec, "nodes": {**spec["nodes"], **nodes}})
    for role, passes in (
        ("output", ("forward", "grad")),
        ("weight", ("forward", "grad", "update")),
    ):
        for pass_ in passes:
            assert tensor_of(wide, at(wide, node="small", role=role), pass_).missing is None
    large = tensor_of(view, at(view, node="wide", role="output"), "forward").missing
    assert large is not None
    assert yaml.safe_load(large.spec) == {"values": {"max_elements": 50}}
    assert "50" in large.reason


def shown(view: RunView, where: Selection, **fields: Any) -> Shown:
    return Shown(view, where, "kind", "linear", None, False, **fields)


def test_clicks_change_dims_order_and_window(view: RunView) -> None:
    wanted: list[dict[str, object]] = []
    pane = SheetPane(lambda **change: wanted.append(change))
    where = at(view, node="embed", step=4)
    pane.refresh(shown(view, where))
    assert not pane._problem.visible
    for message in ({"place:0": "y"}, {"index:0": "2"}, {"sample": "1"}, {"order": "high"}):
        assert pane.choices.check(message)
        pane._choose(message)
    assert not pane.choices.check({"index:0": "99"})
    assert wanted == [
        {"slicing": "y,0,x", "window": ""}, {"slicing": "2,y,x", "window": ""}, {"batch": "1"},
        {"order": "high", "window": ""},
    ]  # fmt: skip
    pane.refresh(shown(view, where, order="high"))
    values = tensor_of(view, where, "forward").values
    highest = np.unravel_index(values.argmax(), values.shape)
    token = "at:" + ",".join(str(int(i)) for i in highest)
    assert pane.view.tokens[1] == token  # after the next page
    pane._on_message({"send": token})
    assert str(wanted[-1]["slicing"]).startswith(f"{highest[0]},")


def test_values_that_are_not_finite_are_hatched(view: RunView) -> None:
    pane = SheetPane(lambda **_: None)
    pane.refresh(shown(view, at(view, node="blocks.0.mlp.fc2", step=BROKEN_FROM)))
    assert pane.view.html.count('class="broken"') == 1
    assert "1 not finite" in pane.view.html
    pane.refresh(shown(view, at(view, node="head", role="weight", step=4)))
    assert "values: true" in pane.view.html
    assert not pane.view.tokens


def test_without_values_the_reason_takes_the_place_of_the_image(tmp_path: Path) -> None:
    wanted: list[dict[str, object]] = []
    pane = SheetPane(lambda **change: wanted.append(change))
    nodes = {"all": {"select": "**", "values": True}}
    view = traced(tmp_path, {"values": {"max_elements": 40}, "nodes": nodes})
    pane.refresh(shown(view, at(view, node="wide")))
    assert pane.box.css_classes == ["missing"]
    pane._on_message({"send": pane.view.tokens[0]})
    assert wanted == [{"section": "inspect"}]  # where the preview is
    view = traced(tmp_path, {"values": {"max_elements": 50}, "nodes": nodes})
    pane.refresh(shown(view, at(view, node="wide")))
    assert pane.box.css_classes == []
