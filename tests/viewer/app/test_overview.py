"""The overview of all tensors over the run shows what numpy computes from each."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from comgra_decl.viewer.model.graph import Scale, scale_of
from comgra_decl.viewer.model.overview import Overview, label_of, overview, places_of
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.palette import colour_at, signed_colour
from comgra_decl.viewer.panes.figures import Frame, unit_range
from comgra_decl.viewer.panes.overview import labelled
from tests.support.fake_run import FakeRun
from tests.viewer.app.conftest import BROKEN_FROM


def picture(view: RunView, pass_: str = "forward", **fields: object) -> Overview:
    found = overview(view, resolve(view, Selection(**fields), {}), pass_)  # type: ignore[arg-type]
    assert found is not None
    return found


def line(shown: Overview, node: str, role: str = "output") -> int:
    return next(i for i, s in enumerate(shown.slots) if (s.node, s.role) == (node, role))


def test_each_line_is_the_statistic_of_its_tensor(fake: FakeRun, view: RunView) -> None:
    for pass_ in ("forward", "grad"):
        shown = picture(view, pass_, statistic="std")
        slot = next(s for s in fake.slots if s.key == ("embed", "output", 0, pass_))
        tensors = [fake.tensor(slot, step, "train") for step in range(12)]
        expected = [t.reshape(len(t), -1).astype(np.float64).std(1).mean() for t in tensors]
        assert shown.values[line(shown, "embed")] == pytest.approx(expected, rel=1e-5)


def test_what_is_not_finite_is_marked_and_not_painted(view: RunView) -> None:
    shown = picture(view, statistic="mean")
    broken = ~np.isnan(shown.broken)
    assert broken.any()
    assert not broken[:, :BROKEN_FROM].any()
    assert np.isnan(shown.places[~np.isfinite(shown.values)]).all()


def test_tensors_stand_in_the_order_of_execution_and_parameters_last(view: RunView) -> None:
    kinds = [slot.kind for slot in picture(view).slots]
    owned = [kind in ("parameter", "buffer") for kind in kinds]
    assert owned == sorted(owned)
    computed = [s.id for s, own in zip(picture(view).slots, owned, strict=True) if not own]
    assert computed == sorted(computed)


def test_the_selected_tensor_has_a_line(view: RunView) -> None:
    at = resolve(view, Selection(node="embed"), {})
    shown = picture(view)
    found = shown.line_of(at)
    assert found is not None
    assert shown.slots[found].node == "embed"


def test_a_pass_nobody_recorded_has_no_picture(view: RunView) -> None:
    assert overview(view, resolve(view, Selection(), {}), "update") is None


@given(arrays(np.float64, st.integers(2, 60), elements=st.floats(-1e6, 1e6, allow_subnormal=False)))
def test_places_have_the_colours_of_the_graph(values: np.ndarray) -> None:
    scale: Scale = scale_of(values)
    places = places_of(scale, values)
    assert ((places >= 0) & (places <= 1)).all()
    for value, place in zip(values.tolist(), places.tolist(), strict=True):
        mine = signed_colour(2 * place - 1) if scale.diverging else colour_at(place)
        theirs = scale.colour(value)
        channels = [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (mine, theirs)]
        assert np.ptp(channels, axis=0).max() <= 1


def test_the_lines_of_findings_and_of_the_selected_tensor_have_labels() -> None:
    assert labelled(10, [3]) == list(range(10))
    assert 37 in labelled(100, [37])
    assert 37 not in labelled(100, [])


@given(st.integers(1, 300), st.lists(st.integers(0, 10_000), max_size=9))
def test_labels_do_not_overlap(count: int, wanted: list[int]) -> None:
    first = [line % count for line in wanted]
    lines = labelled(count, first)
    assert not first or first[0] in lines
    assert len(lines) <= 26
    assert all(b - a >= -(-count // 26) for a, b in pairwise(lines))


def test_no_line_marks_the_step_where_a_message_is_shown() -> None:
    frame = Frame(x_range=unit_range(), tooltips=[])
    frame.mark_step(3)
    assert line_shown(frame)
    frame.show_message("Nothing was recorded for this pass.")
    assert not line_shown(frame)
    frame.mark_step(4)
    assert not line_shown(frame)
    frame.show_message("")
    assert line_shown(frame)


def line_shown(frame: Frame) -> bool:
    return frame._span is not None and bool(frame._span.visible)


@pytest.mark.parametrize(
    ("node", "role", "label"),
    [
        ("head", "output", "head"),
        ("head", "weight", "head.weight"),
        ("input", "input", "input"),
        ("input", "input.ids", "input.ids"),
        ("target", "target", "target"),
    ],
)
def test_rows_name_nodes_and_roles_once(view: RunView, node: str, role: str, label: str) -> None:
    slot = next(iter(view.slots.values()))
    assert label_of(replace(slot, node=node, role=role)) == label
