"""What a person sees can be downloaded in a real browser: pictures, drawings, numbers."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from comgra_decl.query import open_run
from tests.support.fake_run import FakeRun
from tests.support.tables import read_csv

pytestmark = pytest.mark.browser

SVG = "{http://www.w3.org/2000/svg}"


def taken(page: Any, button: str, entry: str) -> tuple[str, bytes]:
    """Downloads a file by keyboard, like a user without a mouse; returns its name and bytes."""
    page.get_by_role("button", name=button, exact=True).first.press("Enter")
    with page.expect_download() as download:
        item = page.get_by_role("menuitem", name=entry).locator("visible=true")
        item.press("Enter")
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def ground(picture: Image.Image) -> tuple[int, ...]:
    pixel = picture.convert("RGB").getpixel((1, picture.height - 2))
    assert isinstance(pixel, tuple)
    return pixel


@pytest.mark.slow
def test_figures_are_pictures_drawings_and_numbers(
    viewer: Callable[..., Any], fake: FakeRun
) -> None:
    page = viewer("?node=head&step=5&stat=std", color_scheme="dark")
    box = page.locator(".bk-Figure").first.bounding_box()
    name, content = taken(page, "Save forward series", "PNG")
    assert (name.startswith("head-step5-forward"), name[-4:]) == (True, ".png")
    picture = Image.open(io.BytesIO(content))
    assert picture.width == pytest.approx(box["width"], abs=2)
    assert ground(picture) == (0x17, 0x1B, 0x24)  # text is light here, so the ground is dark
    pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    assert len(np.unique(pixels, axis=0)) > 20
    assert pixels.min(1).max() > 180  # and the text is indeed light
    drawing = ET.fromstring(taken(page, "Save forward series", "SVG")[1])
    assert drawing.tag == f"{SVG}svg"
    assert len(drawing.findall(f".//{SVG}path")) > 5
    assert "forward" in "".join(drawing.itertext())
    name, content = taken(page, "Save gradient series", "CSV")
    assert name == "head-output-step5-gradient_series.csv"
    series = open_run(fake.path).slot("head", of="grad").series("std")
    got = read_csv(io.BytesIO(content))
    np.testing.assert_array_equal(got["std"], series)


@pytest.mark.slow
def test_the_graph_is_taken_whole(viewer: Callable[..., Any], fake: FakeRun) -> None:
    page = viewer("?node=head&step=5&colour=forward&stat=l2")
    drawing = ET.fromstring(taken(page, "Save the graph", "SVG")[1])
    assert {"embed", "head"} <= set(drawing.itertext())
    picture = Image.open(io.BytesIO(taken(page, "Save the graph", "PNG")[1]))
    wanted = float(drawing.get("width", 0)) / float(drawing.get("height", 1))
    assert picture.width / picture.height == pytest.approx(wanted, rel=0.01)
    colours = picture.convert("RGB").getcolors(1 << 24)
    assert colours is not None
    assert len(colours) > 20
    table = read_csv(io.BytesIO(taken(page, "Save the graph", "CSV")[1])).set_index("node")
    value = open_run(fake.path).series("head", "l2")[5]
    assert table.loc["head", "forward l2"] == value


def test_tables_are_taken_by_their_button(viewer: Callable[..., Any], fake: FakeRun) -> None:
    page = viewer("?node=head&step=5&stat=std")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save these statistics as CSV").click()
    table = read_csv(download.value.path()).set_index(["of", "statistic"])
    value = open_run(fake.path).series("head", "std")[5]
    assert table.loc[("batch", "std"), "forward"] == value


@pytest.mark.slow
def test_a_pane_of_a_notebook_gives_its_files(
    serve: Callable[..., str], page: Any, fake: FakeRun
) -> None:
    run = open_run(fake.path)
    page.goto(serve(lambda: run.view("series", node="head", statistic="l2")))
    assert taken(page, "Save forward series", "PNG")[1].startswith(b"\x89PNG")
    content = taken(page, "Save forward series", "CSV")[1]
    got = read_csv(io.BytesIO(content))
    np.testing.assert_array_equal(got["l2"], run.series("head", "l2"))
