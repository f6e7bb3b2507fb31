"""The page opens with the answer: a one-line verdict, and a walkthrough of the evidence."""

from __future__ import annotations

from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from comgra_decl.query import open_run, row_of
from comgra_decl.rules import Diagnosis, Finding, Link, Place, Reading, Unchecked, health
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.findings import opening
from comgra_decl.viewer.model.fitting import fitting
from comgra_decl.viewer.model.headline import (
    Headline,
    about,
    counted,
    headline,
    headline_of,
    tab_counts,
)
from comgra_decl.viewer.model.numbers import number
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.model.series import Curve
from comgra_decl.viewer.model.story import story_of, svg_of
from comgra_decl.viewer.model.verdicts import Found, found, look, may_be_behind
from comgra_decl.viewer.model.walk import walk_of, walk_place
from comgra_decl.viewer.panes.run import FactsPane
from comgra_decl.viewer.panes.strip import _line
from tests.support.fake_run import FakeRun
from tests.support.traced import traced, train
from tests.viewer.app.conftest import BROKEN_FROM

LAST = 90


def finding(severity: Any = "error", **fields: Any) -> Finding:
    fields = {"rule": "dead_units", "first_step": 3, "last_step": LAST, "message": "All are 0.",
              "advice": "Look.", "place": Place("embed"), **fields}  # fmt: skip
    return Finding(severity=severity, **fields)


def said(diagnosis: Diagnosis | None, *, live: bool = False, **fields: Any) -> Headline:
    return headline_of(Found(diagnosis, **fields), live=live, last=LAST)


def everything_checked() -> Diagnosis:
    """Returns a diagnosis in which every question is answered with yes."""
    questions = [check.question for check in health(Diagnosis([], [], [], 9))]
    names = [name for question in questions for name in question.named]
    readings = {q.reading: Reading("loss 2 \u2192 1") for q in questions if q.reading}
    return Diagnosis([], [], names, 9, readings=readings)


@pytest.fixture
def looked(fake: FakeRun) -> RunView:
    """A run with NaN from step 9 on, recorded without rules and checked since."""
    view = RunView(open_run(fake.path))
    assert look(view).wait(60)
    return view


def test_findings_are_counted_worst_first_and_the_first_is_named() -> None:
    found_ = [finding(), finding("warning", rule="a"), finding("warning", rule="b")]
    line = said(Diagnosis(found_, [], [], 9, readings={"falling": Reading("loss 2 \u2192 1")}))
    assert (line.tone, line.lead) == ("error", "1 error, 2 warnings")
    assert line.text == "dead units in embed since step 3"
    assert line.numbers == "loss 2 \u2192 1"
    assert counted([finding("hint"), finding()]) == "1 error, 1 hint"


def test_the_tone_is_that_of_the_worst_finding_even_if_another_explains_it() -> None:
    cause, effect = finding("warning", outcome="error"), finding(because="dead_units", rule="x")
    assert said(Diagnosis([cause, effect], [], [], 9)).tone == "error"


def test_the_severity_of_the_first_finding_is_named_if_others_are_worse() -> None:
    cause, effect = finding("warning", outcome="error"), finding(rule="x")
    line = said(Diagnosis([cause, effect], [], [], 9))
    assert line.lead == "1 error, 1 warning"
    assert line.text == "dead units in embed since step 3 (warning)"


def test_the_strip_shows_the_first_and_last_loss_of_the_table_of_runs(looked: RunView) -> None:
    logged = looked.run.kpis()
    loss = logged[(logged["name"] == "loss") & (logged["type"].fillna("train") == "train")]
    first, last = loss["value"].iloc[[0, -1]]
    line = headline(looked)
    assert line.numbers.startswith(f"loss {number(first)} \u2192 {number(last)}")
    assert row_of(looked.run).last["loss"] == last
    assert line.curve[0] == (loss["step"].iloc[0], first)
    assert line.curve[-1] == (loss["step"].iloc[-1], last)
    html = _line(line, walking=False)
    assert "<polyline" in html
    assert line.averaged in unescape(html)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "dead units in embed since step 3"),
        ({"last_step": 40}, "dead units in embed at steps 3 to 40"),
        ({"last_step": 3}, "dead units in embed at step 3"),
        ({"place": None}, "dead units since step 3"),
        ({"after_step": 0}, "dead units in embed between steps 1 and 3, until step 90"),
    ],
)
def test_a_finding_is_said_in_one_line(fields: dict[str, Any], text: str) -> None:
    assert about(finding(**fields), LAST) == text


def test_it_is_green_only_if_every_check_was_made() -> None:
    whole = everything_checked()
    assert said(whole).tone == "good"
    assert said(whole, live=True).lead == "No findings so far"
    one = whole.checked[0]
    less = replace(whole, checked=whole.checked[1:], unchecked=[Unchecked(one, "no records")])
    line = said(less)
    assert line.tone == "neutral"
    assert line.text.startswith("1 of ")
    assert "could not be completed" in line.text
    assert said(replace(whole, damage=("record 3",))).tone == "neutral"


def test_questions_that_do_not_apply_are_not_missing() -> None:
    whole = everything_checked()
    absent = Reading("no attention in the model", "absent")
    line = said(replace(whole, readings={**whole.readings, "attention": absent}))
    assert line.tone == "good"
    assert int(said(whole).text.split()[1]) - int(line.text.split()[1]) == 1


def test_numbers_that_say_no_are_not_green() -> None:
    grows = Reading("loss 2.27 \u2192 3.60", "poor")
    whole = everything_checked()
    line = said(replace(whole, readings={**whole.readings, "falling": grows}))
    assert line.tone == "warning"
    assert "Does the loss fall? loss 2.27 \u2192 3.60" in line.text


def test_a_run_that_no_rule_has_checked_says_so_and_offers_a_check() -> None:
    assert said(None).unasked
    assert said(None).tone == "neutral"
    assert "Checking" in said(None, looking=True).lead
    assert said(Diagnosis([], [], [], 0)).unasked
    assert said(None, problem="OSError: torn").text == "OSError: torn"


def test_a_page_opens_at_the_worst_finding_or_else_at_the_loss(fake: FakeRun) -> None:
    view = RunView(open_run(fake.path))
    assert opening(view) == {"node": "loss", "role": "output", "iteration": 0}
    assert look(view).wait(60)
    first = next(f for f in _findings(view) if f.place is not None)
    assert first.place is not None
    at = opening(view)
    assert (at["node"], at["step"]) == (first.place.node, first.first_step)
    assert opening(view, step=2)["step"] == 2


def test_a_link_that_names_a_node_opens_there(root: Path) -> None:
    assert Dashboard(Catalogue(root), query="?node=embed").state.node == "embed"
    at = Dashboard(Catalogue(root), query="?step=4").state
    assert (at.node, at.step) == ("loss", 4)


def test_tabs_count_what_there_is(looked: RunView) -> None:
    counts = tab_counts(looked)
    findings = _findings(looked)
    assert counts["findings"] == (str(len(findings)), findings[0].severity)
    assert counts["kpis"][0] == str(looked.run.kpis()["name"].nunique())
    assert "notes" not in counts  # there are none


def test_a_walk_goes_from_the_problem_along_the_chain_to_the_advice(looked: RunView) -> None:
    chain = (Link(Place("embed"), 2, "dead_units"), Link(Place("head"), 4, "all_zero"))
    one = finding(place=Place("head"), chain=chain, evidence={"share": 0.25},
                  others=(Place("cell", "output", 1),), also=3)  # fmt: skip
    stops = walk_of(looked, one)
    assert [stop.title for stop in stops] == ["head", "embed", "cell, iteration 1", "What to do"]
    assert stops[0].sentences[0] == one.message
    assert "probable cause: dead units from step 2" in stops[1].sentences[0]
    assert "3 other tensors" in stops[2].sentences[0]
    assert stops[-1].sentences == ("Look.", "Measured: share 0.2500.")
    assert all(sentence.endswith(".") for stop in stops for sentence in stop.sentences)


def test_without_a_chain_it_compares_with_the_tensors_that_feed_it(
    fake: FakeRun, looked: RunView
) -> None:
    one = finding(place=Place("blocks.0.mlp.fc2"), first_step=4)
    stops = walk_of(looked, one)
    assert stops[1].title == "blocks.0.mlp.fc1"
    slot = next(s for s in fake.slots if s.key == ("blocks.0.mlp.fc1", "output", 0, "forward"))
    tensor = fake.tensor(slot, 4)
    lowest = tensor.reshape(len(tensor), -1).min(axis=1).mean()
    assert f"{abs(lowest):.4g}"[:5] in stops[1].sentences[0]


def test_the_statistic_that_the_rule_measures_is_shown_and_selected(
    fake: FakeRun, looked: RunView
) -> None:
    one = finding(rule="nonfinite", place=Place("blocks.0.mlp.fc2"), first_step=10, after_step=5,
                  evidence={"NaN or infinite elements": 128.0, "share": 0.5})  # fmt: skip
    first, *_, last = walk_of(looked, one)
    slot = next(s for s in fake.slots if s.key == ("blocks.0.mlp.fc2", "output", 0, "forward"))
    bad = ~np.isfinite(fake.tensor(slot, 10))
    each = bad.reshape(len(bad), -1).sum(axis=1).mean()
    told = first.sentences[1]
    assert told.startswith(f"It began between steps 6 and 10 and was last seen at step {LAST}. ")
    assert f"the number of NaN or infinite elements of blocks.0.mlp.fc2 is {each:.4g}" in told
    assert '"nonfinite"' in first.send
    assert "NaN or infinite elements 128, share 0.5000" in last.sentences[1]
    page = story_of(looked, (first,), one, run="r", said=said(None)).decode()
    assert "number of values that are NaN or infinite" in page.partition("<figcaption>")[2]


def test_a_gradient_that_feeds_a_parameter_names_the_parameter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    nodes = {"all": {"select": "**", "capture": ["output", "output_grad", "parameter_grad"]}}
    run = traced(tmp_path, nodes, lambda: train(model, torch.randn(3, 4), steps=3))
    one = finding(place=Place("0", "bias", 0, "grad"), first_step=1, last_step=2)
    told = [stop.sentences[0] for stop in walk_of(RunView(run), one)]
    assert any("0 sends its gradient to 0 bias." in text for text in told), told


def test_a_finding_about_the_loss_shows_the_loss(looked: RunView) -> None:
    stops = walk_of(looked, finding(place=None, rule="loss_spike"))
    assert stops[0].title == "The loss"
    assert '"kpis"' in stops[0].send


def test_walking_moves_the_page_and_closing_restores_its_colours(looked: RunView) -> None:
    root = Path(str(looked.run.path)).parents[1]
    dashboard = Dashboard(Catalogue(root), query="?node=embed&step=2&colour=forward")
    assert dashboard._view is not None
    assert look(dashboard._view).wait(60)
    dashboard.poll()
    strip = dashboard.screen.strip.view
    assert "Show me" in strip.html
    strip._handle_msg({"send": "show"})
    state = dashboard.state
    assert (state.section, state.step) == ("inspect", BROKEN_FROM)
    assert state.colour == "rule:nonfinite"
    assert walk_place(state.walk) == (0, 0)
    strip._handle_msg({"send": "next"})
    assert walk_place(state.walk) == (0, 1)
    strip._handle_msg({"send": "back"})
    strip._handle_msg({"send": "close"})
    assert (state.walk, state.colour) == ("", "forward")
    while True:  # the last stop ends it
        strip._handle_msg({"send": "next" if state.walk else "show"})
        if "Done" in strip.html:
            break
    strip._handle_msg({"send": "next"})
    assert state.walk == ""


def test_an_exported_walk_is_one_page_that_needs_nothing_else(looked: RunView) -> None:
    worst = _findings(looked)[0]
    hostile = replace(worst, message='<script>alert("1")</script> & more')
    stops = walk_of(looked, hostile)
    line = headline_of(found(looked), live=False, last=11)
    page = story_of(looked, stops, hostile, run="group/small", said=line).decode()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not any(sign in page for sign in ("http:", "https:", "url(", "src=", "@import"))
    assert page.count("<li") == len(stops)


def test_a_drawing_breaks_where_nothing_was_recorded() -> None:
    values = np.array([1.0, 2.0, np.nan, 3.0])
    line = Curve(np.arange(4), values, bounds=(0.0, 4.0))
    drawn = svg_of(line, 1, label="a < b")
    path = drawn.partition('stroke-linecap="round" d="')[2].partition('"')[0]
    assert path.count("M") == 2
    assert path.count("L") == 1
    assert 'aria-label="a &lt; b"' in drawn


def test_the_first_statistic_fits_the_tensor(view: RunView) -> None:
    shapes = {slot.id: slot for slot in view.slots.values()}
    one = next(iter(shapes.values()))
    cases = {
        ("mean", "mean"): replace(one, kind="loss", shape=(), batch_dim=None),
        ("mean", "std"): replace(one, kind="computed", shape=(64, 1), batch_dim=0),
        ("std", "mean"): replace(one, kind="computed", shape=(64, 5), batch_dim=0),
    }
    for expected, slot in cases.items():
        fit = fitting(view, slot)
        assert (fit.statistic, fit.batch) == expected
    scalar = replace(one, kind="parameter", shape=(1,), batch_dim=None)
    assert fitting(view, scalar).statistic == "mean"
    per_sample_loss = replace(one, kind="loss", shape=(64,), batch_dim=0)
    assert fitting(view, per_sample_loss).batch == "mean"


def test_a_chosen_statistic_stays_and_an_automatic_one_follows_the_tensor(view: RunView) -> None:
    at = resolve(view, Selection(node="loss", auto_statistic=True, auto_batch=True), {})
    assert (at.statistic, at.auto_statistic) == ("mean", True)
    at = resolve(view, replace(at, node="embed", role=""), {})
    assert (at.statistic, at.batch) == ("std", "mean")
    at = resolve(view, replace(at, node="loss", role="", statistic="l2", auto_statistic=False), {})
    assert (at.statistic, at.auto_statistic) == ("l2", False)


def test_views_of_all_tensors_do_not_change_with_the_selected_one(view: RunView) -> None:
    one, other = (
        resolve(view, Selection(node=node, auto_statistic=True, auto_batch=True), {}).wide
        for node in ("loss", "embed")
    )
    assert (one.statistic, one.batch) == (other.statistic, other.batch) == ("std", "mean")
    mine = Selection(statistic="max", batch="2")
    assert mine.wide == mine


def _findings(view: RunView) -> list[Finding]:
    diagnosis = found(view).diagnosis
    assert diagnosis is not None
    return diagnosis.findings


@pytest.mark.parametrize("state", ["stopped", "finished", "failed", "live"])
def test_the_stored_results_of_a_killed_program_are_checked_again(
    state: str, fake: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are as old as its last commit of findings; its losses may be newer."""
    view = RunView(open_run(fake.path))
    monkeypatch.setattr(type(view.run), "state", property(lambda _: state))
    assert not may_be_behind(view), "no results were stored"
    stored = Diagnosis([], [], [], 1)
    monkeypatch.setattr("comgra_decl.viewer.model.verdicts.stored", lambda _: stored)
    view = RunView(open_run(fake.path))
    assert may_be_behind(view) is (state == "stopped")
    assert look(view).wait(60)
    assert not may_be_behind(view)


def test_the_overview_of_a_failed_run_shows_the_exception_and_counts_it(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)

    def fail() -> None:
        train(model, torch.randn(3, 4), steps=2)
        raise ValueError("no more data")

    with pytest.raises(ValueError, match="no more data"):
        traced(tmp_path, {"all": {"select": "**", "capture": ["output"]}}, fail)
    dashboard = Dashboard(Catalogue(tmp_path), query="?section=overview")
    (facts,) = (
        pane.view.html
        for pane in dashboard.screen.sections["overview"].panes
        if isinstance(pane, FactsPane)
    )
    assert "no more data" in facts
    assert "Findings: how the program ended" in facts
    view = dashboard.catalogue.open(dashboard.state.run)
    assert tab_counts(view)["findings"] == ("1", "error")
