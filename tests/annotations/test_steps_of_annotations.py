"""Everything that a program logs or shows is stored at the step that the program counts."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from torch import nn

import comgra_decl as comgra
from comgra_decl.query import Run

KINDS = ("image", "figure", "text", "kpi", "note")
STEPS = 8
BARE = {"nodes": {"all": {"select": "**", "capture": ["output"]}}, "rules": "off", "graph": False}

Annotated = dict[int, list[tuple[str, str]]]
"""What a program annotates at each step: kinds, and whether before or after the step's end."""


def annotate(kind: str, step: int, session: int) -> None:
    """Annotate a step so that the annotation itself says which step and session it is."""
    if kind == "image":
        comgra.image(np.full((1, 1), 10 * session + step, np.uint8), "image")
    elif kind == "figure":
        colour = (session / 5, step / 255, 0.0)
        comgra.figure(Figure(figsize=(1, 1), dpi=4, facecolor=colour), "figure")
    elif kind == "text":
        comgra.text(f"{session} {step}", "text")
    elif kind == "kpi":
        comgra.kpi("kpi", 10 * session + step)
    else:
        comgra.note(f"{session} {step}")


def train(steps: range, annotated: Annotated, *, session: int, explicit: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in steps:
        loss = model(torch.ones(3, 2)).square().sum()
        if not explicit:
            loss.backward()
        for kind, place in annotated.get(step, ()):
            if place == "before":
                annotate(kind, step, session)
        if explicit:
            comgra.step()
        else:
            optimizer.step()
        for kind, place in annotated.get(step, ()):
            if place == "after":
                annotate(kind, step, session)


def found(run: Run) -> set[tuple[str, int, int, int]]:
    """Return the kind, the stored step, and the session and step in each annotation."""
    kpis, notes = run.kpis(), run.notes()
    kpis = kpis[kpis["name"] == "kpi"]
    rows = {
        ("kpi", s, *divmod(int(v), 10)) for s, v in zip(kpis["step"], kpis["value"], strict=True)
    }
    for step, text in zip(notes["step"], notes["text"], strict=True):
        if text[0].isdigit():  # not the note on resuming
            rows.add(("note", step, *map(int, text.split())))
    for step, name, _ in run.shown.itertuples(index=False, name=None):
        value: Any = run.shown_value(name, step)
        if name == "text":
            rows.add((name, step, *map(int, value.split())))
        elif name == "image":
            rows.add((name, step, *divmod(int(value.item()), 10)))
        else:
            rows.add((name, step, round(int(value[0, 0, 0]) / 51), int(value[0, 0, 1])))
    return {(kind, int(stored), session, step) for kind, stored, session, step in rows}


def sessions(kind: str, step: int, resumed: int | None) -> list[int]:
    """Return the sessions whose annotation of a step the run shows."""
    if resumed is None or step < resumed:
        return [1]
    return [1, 2] if kind == "note" and step == resumed else [2]


@settings(max_examples=8, deadline=None)
@given(
    annotated=st.dictionaries(
        st.integers(0, STEPS - 1),
        st.lists(
            st.tuples(st.sampled_from(KINDS), st.sampled_from(["before", "after"])),
            min_size=1,
            max_size=3,
            unique_by=lambda each: each[0],
        ),
        min_size=1,
        max_size=4,
    ),
    schedule=st.sampled_from([(1, None), (2, None), (1, 3), (0, 5), (9, 1)]),
    explicit=st.booleans(),
    resumed=st.none() | st.integers(1, STEPS - 2),
)
@example({5: [("image", "after")]}, (1, None), False, None)
@example({4: [("text", "after")], 7: [("figure", "before")]}, (1, None), False, 3)
def test_annotations_have_the_step_that_the_program_counts(
    annotated: Annotated, schedule: tuple[int, int | None], explicit: bool, resumed: int | None
) -> None:
    """Resumed programs repeat the last step of the first session."""
    first, every = schedule
    spec: dict[str, Any] = {**BARE, "schedule": {"first": first, "every": every}}
    if explicit:
        spec["schedule"]["step"] = "explicit"
    with tempfile.TemporaryDirectory() as root:
        place = {"root": root, "group": "g", "name": "run"}
        end = STEPS if resumed is None else resumed + 1
        with comgra.trace({**spec, "run": place}) as session:
            train(range(end), annotated, session=1, explicit=explicit)
        if resumed is not None:
            again = {"root": root, "group": "g", "resume": True, "resume_step": resumed}
            with comgra.trace({**spec, "run": again}) as session:
                train(range(resumed, STEPS), annotated, session=2, explicit=explicit)
        assert session.path is not None
        run = comgra.open_run(session.path)
        wanted = {
            (kind, step, session, step)
            for step, kinds in annotated.items()
            for kind, _ in kinds
            for session in sessions(kind, step, resumed)
        }
        assert found(run) == wanted
