"""The results of an experiment with the script are on the findings page."""

from __future__ import annotations

from comgra_decl.query import NotedCheck, open_run
from comgra_decl.store.checks import note_check
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.model.verdicts import found, look
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.findings import page_of
from tests.support.fake_run import FakeRun


def page(fake: FakeRun) -> str:
    view = RunView(open_run(fake.path))
    assert look(view).wait(60)
    at = resolve(view, Selection(), {})
    shown = Shown(view, at, colour="kind", scale="linear", expanded=None, follow=False)
    return page_of(found(view), shown)


def test_the_checklist_shows_the_verdict_and_where_it_comes_from(fake: FakeRun) -> None:
    line = '<li class="{}" title="{}: {}'
    before = page(fake)
    command = "run comgra-decl batch-mixing --for RUN"
    assert line.format("unchecked", "not checked", command) in before
    reason = "the answer to sample 0 changes by 0.2 of its size"
    note_check(open_run(fake.path).path, NotedCheck("batch_mixing", "bad", reason, "x", 1.7e9))
    after = page(fake)
    assert line.format("red", "red", f"{reason} (batch-mixing, 2023-11-14 22:13 UTC)") in after
    assert "comgra-decl overfit-one-batch --for RUN" in after
