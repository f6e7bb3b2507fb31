"""What a program shows with `comgra.image`, `comgra.figure` and `comgra.text` is kept as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import comgra_decl as comgra
from comgra_decl.errors import AnnotationError, UnknownNameError
from comgra_decl.query import Run
from comgra_decl.store.copying import copy_run
from comgra_decl.store.verify import verify
from comgra_decl.viewer.components.parts import joined
from comgra_decl.viewer.model.pictures import album
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.panes.pictures import _parts
from tests.annotations.nets import Net
from tests.support.recording import EVERYTHING, contents, recording

COLOURS = np.random.default_rng(0).integers(0, 256, (5, 4, 3), np.uint8)

FORMS: dict[str, Any] = {
    "bytes": COLOURS,
    "channels first": torch.from_numpy(COLOURS).permute(2, 0, 1),
    "floats": torch.from_numpy(COLOURS).float().div(255).requires_grad_(),
    "half": torch.from_numpy(COLOURS[..., 0]).bfloat16().div(256),
    "grey": COLOURS[..., 0],
    "a mask": COLOURS[..., 0] > 100,
    "out of range": np.array([[-1.0, 0.5, 2.0, np.nan]]),
}


def drawn() -> Figure:
    figure = Figure(figsize=(2, 1), dpi=40)
    figure.subplots().plot([1, 3, 2])
    return figure


def pixels(figure: Figure) -> np.ndarray[Any, Any]:
    canvas: Any = FigureCanvasAgg(figure)  # its methods have no annotations
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose steps 2 and 5 show something; only steps 0 and 1 are recorded."""
    net = Net()
    spec = {"schedule": {"first": 2, "every": None}, "rules": "off", "perturbations": False}
    with comgra.trace(spec, root=tmp_path_factory.mktemp("runs")) as session:
        for step in range(7):
            if step == 2:
                for name, value in FORMS.items():
                    comgra.image(value, name)
                comgra.figure(drawn(), "a plot")
                comgra.text("früher <b>\n" + "x" * step, "a text")
            net.step()
            if step == 5:  # about the step that has just ended
                comgra.text("first", "a text")
                comgra.text("last", "a text")
    assert session.path is not None
    return comgra.open_run(session.path)


@pytest.mark.slow
def test_images_are_stored_as_bytes_whatever_their_form(run: Run) -> None:
    for name in ("bytes", "channels first", "floats"):
        assert np.array_equal(run.shown_value(name), COLOURS), name
    half = torch.from_numpy(COLOURS[..., 0]).bfloat16().div(256).float().mul(255).round()
    assert np.array_equal(run.shown_value("half"), half.numpy()[..., None])
    assert np.array_equal(run.shown_value("grey"), COLOURS[..., :1])
    assert np.array_equal(run.shown_value("a mask"), 255 * (COLOURS[..., :1] > 100))
    assert np.array_equal(run.shown_value("out of range"), [[[0], [128], [255], [0]]])


def test_figures_are_drawn_and_texts_are_kept(run: Run) -> None:
    assert np.array_equal(run.shown_value("a plot"), pixels(drawn()))
    assert run.shown_value("a text", 2) == "früher <b>\nxx"
    assert run.shown_value("a text", 5) == run.shown_value("a text") == "last"


def test_all_of_it_is_listed_with_its_step(run: Run) -> None:
    listed = [*run.shown.itertuples(index=False, name=None)]
    assert listed[: len(FORMS)] == [(2, name, "image") for name in FORMS]
    assert listed[len(FORMS) :] == [
        (2, "a plot", "figure"),
        (2, "a text", "text"),
        (5, "a text", "text"),
        (5, "a text", "text"),
    ]
    assert run.steps.tolist() == [0, 1]
    with pytest.raises(UnknownNameError, match="nothing called 'a pot'; did you mean 'a plot'"):
        run.shown_value("a pot")
    with pytest.raises(UnknownNameError, match="'a text' was not shown at step 3, only at 2, 5"):
        run.shown_value("a text", 3)


def test_a_copy_of_the_run_has_it(run: Run, tmp_path: Path) -> None:
    copied = copy_run(run.path, tmp_path / "copy")
    assert verify(copied).damages == []
    again = comgra.open_run(copied)
    assert again.shown.equals(run.shown)
    assert np.array_equal(again.shown_value("bytes"), COLOURS)


def test_the_viewer_shows_the_last_one_up_to_the_selected_step(run: Run) -> None:
    view = RunView(run)
    early, late = (album(view, Selection(step=step)) for step in (3, 6))
    texts = [{e.name: e for e in each.exhibits}["a text"] for each in (early, late)]
    assert [(e.step, e.text) for e in texts] == [(2, "früher <b>\nxx"), (5, "last")]
    page = joined(_parts(early, "", (), over=False))
    assert page.count('<img src="data:image/png;base64,') == len(FORMS) + 1
    assert "früher &lt;b&gt;" in page
    assert "No samples to follow" in page
    assert view.types() == [""]
    assert "a text" not in view.nodes


def test_the_training_and_its_records_are_the_same_to_the_last_bit() -> None:
    def train(*, shows: bool) -> list[Any]:
        torch.manual_seed(0)
        net = Net()
        for _ in range(4):
            if shows:
                comgra.image(torch.ones(3, 4, 4), "white")
                comgra.figure(drawn(), "plot")
            net.step()
        return [*(p.tolist() for p in net.model.parameters()), torch.rand(1).item()]

    plain = train(shows=True)
    assert plain == train(shows=False)
    with recording(EVERYTHING) as bare:
        assert train(shows=False) == plain
    with recording(EVERYTHING) as found:
        assert train(shows=True) == plain
    assert found.faults == []
    own = [i for i, s in enumerate(found.steps) if s.info.type == "shown"]
    assert [found.steps[i].info.step for i in own] == [0, 0, 1, 1, 2, 2, 3, 3]
    others = [i for i in range(len(found.steps)) if i not in own]
    assert [contents(found, i) for i in others] == [contents(bare, i) for i in range(4)]


def test_what_is_too_large_is_left_out_and_said() -> None:
    with recording(EVERYTHING) as found:
        comgra.image(np.zeros((2000, 1000, 3), np.uint8), "huge")
        comgra.text("ä" + 69_999 * "x", "long")
        comgra.text(65_536 * "x", "just right")
        comgra.image(np.array([[object()]]), "odd")
        Net().step()
    assert found.faults == []
    assert [s.info.type for s in found.steps] == ["shown", "train"]
    warnings = " ".join(found.report["warnings"])
    assert "the image 'huge' has 6,000,000 bytes and is not stored; the limit is 4,194," in warnings
    assert "the text 'long' has 70,001 bytes and is not stored; the limit is 65,5" in warnings
    assert "the image 'odd' cannot be stored (TypeError" in warnings


WRONG: list[tuple[Any, str]] = [
    (lambda: comgra.image(np.zeros((2, 2)), ""), "name of an image must be a non-empty string"),
    (lambda: comgra.image(np.zeros((4, 3, 5, 5)), "x"), r"the shape .*, got \[4, 3, 5, 5\]"),
    (lambda: comgra.image(np.zeros((7, 5, 5)), "x"), r"with 1, 3 or 4 channels, got \[7, 5, 5\]"),
    (lambda: comgra.image("cat.png", "x"), r"must have the shape .*, got \[\]"),
    (lambda: comgra.image(np.zeros((0, 3)), "x"), r"at least one pixel, got the shape \[0, 3\]"),
    (lambda: comgra.image(torch.ones(2, 2) * 1j, "x"), "real numbers .* dtype torch.complex64"),
    (lambda: comgra.figure(3, "x"), "the figure 'x' must be a matplotlib figure, got int"),
    (lambda: comgra.text("", "x"), "the text 'x' must be a non-empty string, got ''"),
    (lambda: comgra.text("x", " "), "the name of a text must be a non-empty string, got ' '"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_calls_are_errors_with_and_without_tracing(call: Any, message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        call()
    with recording(EVERYTHING), pytest.raises(AnnotationError, match=message):
        call()
