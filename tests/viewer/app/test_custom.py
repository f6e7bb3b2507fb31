"""Custom views: shown, updated, reloaded, and never able to break the page."""

from __future__ import annotations

import os
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from comgra_decl.errors import ComgraError
from comgra_decl.viewer.custom import READS, Look, View, ViewsFile
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.page import _wanted

DOCUMENT = Path(__file__).parents[3] / "docs" / "viewer.md"
GOOD = """
from comgra_decl.viewer.custom import View
import panel as pn
calls = []
def build(look):
    calls.append(("build", look.node, look.step))
    return pn.pane.Markdown(f"{look.node} {look.step}")
def update(pane, look):
    calls.append(("update", look.node, look.step))
    pane.object = f"{look.node} {look.step}"
def views():
    return [View("Where", build, update, reads={"node", "step"}), View("Again", lambda look: look.statistic)]
"""  # noqa: E501


def write(path: Path, text: str) -> None:
    """Writes the file as an editor would: as a new file, with a later time."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    os.utime(path, ns=(before + 10**9, before + 10**9))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "views.py", GOOD)
    return tmp_path / "views.py"


def opened(root: Path, file: Path) -> tuple[Dashboard, Any]:
    dashboard = Dashboard(Catalogue(root), query="?section=views", views=ViewsFile(file))
    return dashboard, dashboard.screen.sections["views"].panes[0]


def shown(pane: Any) -> list[Any]:
    return [card._place.objects[0].object for card in pane._cards]


def test_views_are_built_once_and_updated_when_they_read_a_change(root: Path, file: Path) -> None:
    dashboard, pane = opened(root, file)
    dashboard.change(node="embed", step=4)
    assert shown(pane) == ["embed 4", "std"]
    calls = dashboard._views.views[0].build.__globals__["calls"]  # type: ignore[union-attr]
    known = len(calls)
    dashboard.change(statistic="l2")
    assert shown(pane) == ["embed 4", "l2"]
    assert len(calls) == known  # it does not read the statistic
    dashboard.change(step=5)
    assert calls[known:] == [("update", "embed", 5)]
    assert [call for call, *_ in calls].count("build") == 1


def test_an_edited_file_is_read_again_and_its_errors_are_shown(root: Path, file: Path) -> None:
    dashboard, pane = opened(root, file)
    write(file, GOOD.replace('"Where"', '"Here"'))
    dashboard.poll()
    assert [card._view.name for card in pane._cards] == ["Here", "Again"]
    write(file, "def views(:\n")
    dashboard.poll()
    assert pane._trouble.visible
    assert "SyntaxError" in pane._trouble.html
    assert [card._view.name for card in pane._cards] == ["Here", "Again"]  # what worked remains
    write(file, GOOD)
    dashboard.poll()
    assert not pane._trouble.visible
    file.unlink()
    dashboard.poll()
    assert "cannot read" in pane._trouble.html
    assert not dashboard.screen.banner.visible


def test_a_view_that_fails_is_alone_in_that(root: Path, file: Path) -> None:
    code = GOOD.replace("return [", "return [View('Bad', lambda look: [][look.step]),")
    write(file, code)
    dashboard, pane = opened(root, file)
    bad, *others = pane._cards
    assert bad._trouble.visible
    assert "IndexError" in bad._trouble.html
    assert "views.py" in bad._trouble.html
    assert "panes/custom.py" not in bad._trouble.html
    assert not any(card._trouble.visible for card in others)
    assert not pane._problem.visible
    write(file, GOOD)
    dashboard.poll()
    assert shown(pane)[1] == "mean"


@pytest.mark.parametrize(
    ("code", "said"),
    [("x = 1", "no `views` function"), ("def views(): return 3", "must return a list of View")],
)
def test_a_file_that_is_none_says_what_is_expected(tmp_path: Path, code: str, said: str) -> None:
    write(tmp_path / "views.py", code)
    problem = ViewsFile(tmp_path / "views.py").problem
    assert isinstance(problem, ComgraError)
    assert said in str(problem)


def test_a_view_can_only_read_what_there_is() -> None:
    with pytest.raises(ComgraError, match=r"did you mean.*statistic"):
        View("x", lambda look: look, reads={"statistics"})
    assert set(Look.__dataclass_fields__) == READS | {"select", "links"}


def test_without_a_file_there_is_no_such_section(root: Path) -> None:
    dashboard = Dashboard(Catalogue(root), query="?section=views")
    assert dashboard.state.section == "overview"
    assert "views" not in dashboard.screen.sections
    assert 'data-send="views"' not in dashboard.screen.tabs.html


def test_the_command_line_names_folder_and_file() -> None:
    assert _wanted([]) == (Path("runs"), None)
    assert _wanted(["a", "--views", "b.py"]) == (Path("a"), Path("b.py"))
    assert _wanted(["--views=b.py"]) == (Path("runs"), Path("b.py"))
    with pytest.raises(ComgraError, match="--view"):
        _wanted(["a", "b.py", "--unknown"])


def test_the_example_of_the_documents_runs(root: Path, tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    examples = [block for block in code if "def views()" in block]
    assert len(examples) == 2
    for number, example in enumerate(examples):
        write(tmp_path / f"my_views{number}.py", example)
        dashboard, pane = opened(root, tmp_path / f"my_views{number}.py")
        dashboard.change(node="embed", step=4, statistic="std")
        assert pane._cards
        for card in pane._cards:
            assert not card._trouble.visible, card._trouble.html
            assert card._place.objects


def test_selecting_what_the_run_does_not_have_raises_an_error(root: Path, file: Path) -> None:
    write(file, GOOD.replace("lambda look: look.statistic", "lambda look: looks.append(look) or ''"
                             ).replace("calls = []", "calls = []\nlooks = []"))  # fmt: skip
    dashboard, _ = opened(root, file)
    dashboard.change(node="embed", step=4)
    assert dashboard._views is not None
    select = dashboard._views.views[0].build.__globals__["looks"][-1].select
    with pytest.raises(ComgraError, match=r"no node 'heat'.*did you mean.*head"):
        select(node="heat", step=3)
    with pytest.raises(ComgraError, match=r"no argument 'nodes'.*did you mean.*node"):
        select(nodes="head")
    assert (dashboard.state.node, dashboard.state.step) == ("embed", 4)
    select(node="head", step=3)
    assert (dashboard.state.node, dashboard.state.step) == ("head", 3)


def test_html_in_a_text_is_shown_as_text(root: Path, file: Path) -> None:
    text = "'**bold** <img src=x onerror=alert(1)>\\n\\n<script>alert(2)</script>'"
    write(file, GOOD.replace("look.statistic", text))
    _, pane = opened(root, file)
    html = (
        pane._cards[1]
        ._place.objects[0]
        ._transform_object(pane._cards[1]._place.objects[0].object)["object"]
    )
    html = unescape(html)
    assert "<strong>bold</strong>" in html
    assert "<img" not in html
    assert "<script" not in html
    assert "&lt;img" in html


DYNAMIC = """
import holoviews as hv
from comgra_decl.viewer.custom import View
drawn = []
def good(step, **others):
    drawn.append(step)
    return hv.Curve([(0, step)])
def bad(step, **others):
    if step == 5:
        raise ValueError("not five")
    return hv.Curve([(0, step)])
def views():
    return [
        View("Bad", lambda look: hv.DynamicMap(bad, streams=[look.stream]), reads=()),
        View("Good", lambda look: hv.DynamicMap(good, streams=[look.stream]), reads=()),
    ]
"""


@pytest.mark.parametrize("first", [4, 5])
def test_an_error_of_a_dynamic_map_concerns_its_view_only(
    root: Path, file: Path, first: int
) -> None:
    write(file, DYNAMIC)
    query = f"?section=views&node=embed&step={first}"
    dashboard = Dashboard(Catalogue(root), query=query, views=ViewsFile(file))
    pane: Any = dashboard.screen.sections["views"].panes[0]
    pane.panel.get_root()  # as on a page
    dashboard.change(step=5)
    bad, good = pane._cards
    assert bad._trouble.visible
    assert not bad._place.visible
    assert "not five" in bad._trouble.html
    assert "views.py" in bad._trouble.html
    assert good._place.visible
    assert not pane._problem.visible
    assert not pane._trouble.visible
    assert dashboard._views is not None
    assert dashboard._views.views[0].build.__globals__["drawn"][-1] == 5
    dashboard.change(step=6)
    assert bad._place.visible
    assert not bad._trouble.visible
