"""The documentation as a website: it is complete, its links work, and it needs no network."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from comgra_decl.query import open_run
from docs.gallery import SHOWN, write
from tests.support.forked import forked

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"""<(?:script|img|iframe|source)[^>]*\bsrc=["']?([^"' >]+)""")
STYLES = re.compile(r"""<link[^>]*rel=["']?(?:stylesheet|preload|preconnect)[^>]*>""")


def built(folder: Path, *arguments: str) -> Path:
    """Build the site in strict mode, in which a link that leads nowhere is an error."""
    done = forked(ROOT, "-m", "docs.site", folder, *arguments, env={"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site without a gallery."""
    return built(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site with a gallery."""
    return built(tmp_path_factory.mktemp("gallery"), "--gallery", "softmax_twice")


def test_every_page_of_the_documentation_is_in_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    names = {
        "index.html" if page.name == "README.md" else page.with_suffix(".html") for page in pages
    }
    assert [name for name in names if not (site / name).is_file()] == []


def test_tests_and_measurements_that_pages_name_are_in_the_site(site: Path) -> None:
    test = Path("tests/export/test_tensorboard.py")
    assert (site / f"repository/{test}.txt").read_text() == (ROOT / test).read_text()
    assert (site / "repository/benchmarks/results/2026-11-24.html").is_file()


@pytest.mark.slow
def test_the_gallery_shows_what_was_found(gallery: Path) -> None:
    assert "cross_entropy receives probabilities" in (gallery / "gallery.html").read_text()
    story = (gallery / "gallery/softmax_twice.html").read_text()
    assert "cross_entropy" in story
    assert "<script" not in story
    assert "Bokeh" in (gallery / "gallery/softmax_twice-plots.html").read_text()


@pytest.mark.slow
def test_the_gallery_has_the_run_itself(gallery: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(gallery / "gallery/softmax_twice.zip", tmp_path / "run")
    findings = open_run(tmp_path / "run").findings()
    assert findings["rule"].iloc[0] in (gallery / "gallery.html").read_text()


@pytest.mark.slow
def test_the_gallery_shows_a_network_from_within(gallery: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(gallery / "gallery/inside.zip", tmp_path / "run")
    run = open_run(tmp_path / "run")
    circuit = run.circuit("paths", int(run.steps[-1]), strongest=3)
    shown = (gallery / "gallery/inside.html").read_text()
    for words in ("cam", "edges", "paths: circuit at step", *circuit.nodes):
        assert words in shown


@pytest.mark.slow
@pytest.mark.parametrize("bug", sorted(SHOWN))
def test_every_bug_of_the_gallery_is_found(bug: str, tmp_path: Path) -> None:
    page = write(tmp_path, names=[bug], inside=False).read_text()
    assert SHOWN[bug] in page
    assert (tmp_path / "gallery" / f"{bug}.html").stat().st_size > 1000


@pytest.mark.parametrize("name", ["site", pytest.param("gallery", marks=pytest.mark.slow)])
def test_nothing_is_loaded_from_another_host(name: str, request: pytest.FixtureRequest) -> None:
    for page in request.getfixturevalue(name).rglob("*.html"):
        text = page.read_text()
        loaded = [*LOADED.findall(text), *STYLES.findall(text)]
        assert [each for each in loaded if "//" in each] == [], page


@pytest.mark.slow
@pytest.mark.browser
def test_the_search_works_in_pages_opened_as_files(site: Path, chromium: Any) -> None:
    page = chromium.new_page(viewport={"width": 1280, "height": 850})
    foreign: list[str] = []
    failed: list[str] = []
    page.on("request", lambda r: foreign.append(r.url) if r.url.startswith("http") else None)
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.goto((site / "compatibility/ways.html").as_uri())
    page.locator("input.md-search__input").fill("vanishing gradient")
    found = page.locator(".md-search-result__link")
    found.first.wait_for()
    assert any("rules.html" in (link.get_attribute("href") or "") for link in found.all())
    assert (foreign, failed) == ([], [])
    page.close()
