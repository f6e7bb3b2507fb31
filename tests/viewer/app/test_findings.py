"""Findings link to their place, are flagged where they begin, and never block the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl
from comgra_decl.query import open_run
from comgra_decl.rules import (
    Correlation,
    Diagnosis,
    Place,
    Reading,
    Side,
    Unchecked,
    diagnose,
    unseen,
)
from comgra_decl.viewer.model.choices import choices, run_choice
from comgra_decl.viewer.model.findings import (
    finding_marks,
    findings_of,
    jump,
    link,
    paint_of,
    painted_rule,
    placed,
    rules_of,
)
from comgra_decl.viewer.model.graph import graph_of
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.model.verdicts import Found, found, look
from comgra_decl.viewer.palette import RED
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.findings import FindingsPane, page_of
from tests.support.fake_run import FakeRun
from tests.viewer.app.conftest import BROKEN_FROM


def shown(view: RunView, **fields: Any) -> Shown:
    at = resolve(view, Selection(**fields), {})
    return Shown(view, at, colour="kind", scale="linear", expanded=None, follow=False)


def looked(view: RunView) -> RunView:
    """Checks a run and waits until the check is over."""
    assert look(view).wait(60)
    return view


@pytest.fixture
def broken(fake: FakeRun) -> RunView:
    """A run with NaN from step 9 on, recorded without rules and checked since."""
    return looked(RunView(open_run(fake.path)))


def test_a_run_without_stored_findings_is_looked_at_once(fake: FakeRun) -> None:
    view = RunView(open_run(fake.path))
    assert found(view).diagnosis is None
    known = found(looked(view))
    assert known.diagnosis is not None
    assert not known.looking
    assert not known.problem
    assert known.diagnosis.findings == diagnose(view.run).findings


def test_what_was_found_while_recording_needs_no_look(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    spec = {"nodes": {"all": {"select": "**", "capture": ["output", "output_grad"]}}}
    with comgra_decl.trace(spec, root=tmp_path, overrides=["schedule.every=1"]) as session:
        for step in range(8):
            loss = net(torch.ones(3, 4)).sum() * (float("nan") if step > 4 else 1.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.path is not None
    known = found(RunView(open_run(session.path)))
    assert known.source == "recorded"
    assert known.diagnosis is not None
    assert known.diagnosis.findings[0].rule == "nonfinite"
    assert isinstance(known.diagnosis.findings[0].place, Place)
    assert "nonfinite" in known.diagnosis.checked


def test_a_look_that_fails_says_so(fake: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr("comgra_decl.viewer.model.verdicts.diagnose", fail)
    view = looked(RunView(open_run(fake.path)))
    assert found(view).problem == "RuntimeError: no more memory"
    assert "no more memory" in page_of(found(view), shown(view))


def test_the_step_bar_flags_where_findings_begin(broken: RunView) -> None:
    marks = finding_marks(broken, "")
    steps = broken.steps("")
    begun = {int(steps[mark.index]): mark for mark in marks}
    assert begun[BROKEN_FROM].colour == RED
    assert "nonfinite" in begun[BROKEN_FROM].title


def test_the_graph_is_painted_only_while_it_is_so(broken: RunView) -> None:
    (place, step, finding), *_ = [p for p in placed(broken, "forward") if p[2].rule == "nonfinite"]
    for at_step, severity in ((step - 1, ""), (step, finding.severity)):
        at = shown(broken, step=at_step).at
        graph = graph_of(broken, at)
        boxes = iter([(node.name, (node.name,)) for node in graph.nodes])
        paint, _ = paint_of(broken, at, graph, boxes=boxes)
        assert set(paint) == {node.name for node in graph.nodes}
        assert paint[place.node]["text"] == severity


def test_one_rule_alone_paints_the_graph(broken: RunView, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = [f for f in findings_of(broken) if f.rule == "nonfinite"][:1]
    assert one.place is not None
    other = replace(one, rule="dead_units", severity="hint", place=Place("embed", "output"))
    both = Found(Diagnosis([replace(one, others=()), replace(other, others=())], [], [], 9))
    monkeypatch.setattr("comgra_decl.viewer.model.findings.found", lambda _: both)
    at = shown(broken, step=one.first_step).at
    graph = graph_of(broken, at)
    wanted = {one.place.node: one.severity, "embed": "hint"}
    cases = {
        "": wanted,
        "nonfinite": {one.place.node: one.severity},
        "dead_units": {"embed": "hint"},
    }
    for rule, painted in cases.items():
        names = iter([(node.name, (node.name,)) for node in graph.nodes])
        paint, legend = paint_of(broken, at, graph, boxes=names, rule=rule)
        assert {name: how["text"] for name, how in paint.items() if how["text"]} == painted
        assert legend["title"] == (rule.replace("_", " ") or "findings")


def test_a_rule_paints_if_it_has_looked_and_no_other_name_does(broken: RunView) -> None:
    diagnosis = found(broken).diagnosis
    assert diagnosis is not None
    quiet = next(rule for rule in diagnosis.checked if rule not in rules_of(broken))
    assert painted_rule(broken, "findings") == ""
    assert painted_rule(broken, f"rule:{quiet}") == quiet
    for colour in ("kind", "grad", "rule:", "rule:<b>", quiet):
        assert painted_rule(broken, colour) is None
    groups = choices(broken, shown(broken).at, f"rule:{quiet}", "linear", run_choice((), ""))
    (colours,) = (f for _, fields in groups for f in fields if f.name == "colour")
    offered = {option.value for option in colours.options}
    assert {"kind", f"rule:{quiet}", *(f"rule:{rule}" for rule in rules_of(broken))} <= offered


def test_a_link_leads_to_tensor_step_pass_and_sample(broken: RunView) -> None:
    at = shown(broken).at
    sent = link(Place("cell", "output", 1, "grad"), 7, sample=2, section="inspect")
    assert jump(broken, at, sent) == {
        "follow": False,
        "step": 7,
        "node": "cell",
        "role": "output",
        "iteration": 1,
        "gradient": "grad",
        "batch": "2",
        "section": "inspect",
    }


def test_a_link_leaves_a_type_that_lacks_the_step(broken: RunView) -> None:
    at = shown(broken, type="eval").at
    assert jump(broken, at, link(None, 7)) == {"follow": False, "type": "", "step": 7}
    assert "type" not in jump(broken, at, link(None, 10))


def test_the_page_sends_what_it_shows_and_nothing_else(broken: RunView) -> None:
    wanted: list[dict[str, object]] = []
    pane = FindingsPane(lambda **change: wanted.append(change))
    pane.refresh(shown(broken))
    first = next(p for p in placed(broken, "forward") if p[2].rule == "nonfinite")
    sent = link(first[0], first[1], sample=first[2].sample)
    assert pane.view.check({"send": sent})
    assert not pane.view.check({"send": sent.replace("9", "8")})
    pane._on_message({"send": sent})
    assert (wanted[0]["node"], wanted[0]["step"]) == (first[0].node, BROKEN_FROM)


def test_what_was_not_checked_is_said_with_the_reason(broken: RunView) -> None:
    diagnosis = found(broken).diagnosis
    assert diagnosis is not None
    assert diagnosis.unchecked
    page = page_of(found(broken), shown(broken))
    for entry in diagnosis.unchecked:
        assert entry.rule.replace("_", " ") in page


def test_the_checklist_shows_who_looked_and_the_numbers(broken: RunView) -> None:
    reading = Reading("loss 2.27 \u2192 1.6 in 50 steps")
    why = Unchecked("loss_not_falling", "it needs 60 losses; the run has 50")
    partly = Diagnosis([], [why], ["loss_diverges"], 50, readings={"falling": reading})
    page = page_of(Found(partly), shown(broken))
    line = next(part for part in page.split("<li") if "Does the loss fall?" in part)
    assert line.startswith(' class="partly" title="partly checked (1 of 2): loss 2.27')
    assert "loss_not_falling not checked: it needs 60 losses" in line
    numbers = f"partly checked (1 of 2); {reading.text}"
    assert f'<span class="numbers">{numbers}</span>' in line
    for sentence in unseen(partly):
        assert f"<p>{sentence}</p>" in page


def test_a_difference_between_groups_links_to_the_loss_of_samples(broken: RunView) -> None:
    loss = Side("loss", Place("head"), "mean")
    correlation = Correlation(
        kind="differs", first=Side("category 3"), second=loss, effect=0.84, low=0.8, high=0.86,
        records=300, count=1193, total=4800, q=0.0, first_step=7, medians=(1.82, 0.0187),
    )  # fmt: skip
    page = page_of(Found(None, (correlation,)), shown(broken))
    assert (
        "Samples of category 3 have a larger loss (1.82 against 0.0187; larger in 92% of pairs, "
        "90% to 93%; 1193 of 4800 samples)."
    ) in page
    assert "Show head" in page
