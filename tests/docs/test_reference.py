"""The reference is complete and up to date."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from typer.main import get_command

import comgra_decl
from comgra_decl.cli.main import app
from comgra_decl.query import Run, Slot
from comgra_decl.records import AGGREGATES, STATISTICS
from comgra_decl.spec.loading import presets
from comgra_decl.spec.nodes import CaptureName
from comgra_decl.spec.schedule import ENDS
from comgra_decl.spec.stats import DERIVED, FormulaName, OptionalName
from docs import reference

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page() -> str:
    return reference.page()


def test_the_reference_is_up_to_date(page: str) -> None:
    if reference.PAGE.read_text() != page:
        pytest.fail("docs/reference.md is not what the code says: run `python -m docs.reference`")


@pytest.mark.slow
def test_the_reference_is_the_same_in_every_process(page: str) -> None:
    code = "import sys; from docs import reference; sys.stdout.write(reference.page())"
    other = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "5"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert other.stdout == page


def test_every_key_of_the_spec_is_explained(page: str) -> None:
    for model in reference.models():
        section = page.split(f"### {model.__name__}\n")[1].split("\n### ")[0]
        for name, field in model.model_fields.items():
            assert f"- **`{field.alias or name}`**: " in section, (model.__name__, name)


def test_every_statistic_has_a_formula(page: str) -> None:
    section = page.split("## Statistics\n")[1].split("\n## ")[0]
    named = {*STATISTICS, *get_args(FormulaName), *get_args(OptionalName), *DERIVED, *AGGREGATES}
    quantiles = {name for name in named if name[0] == "q"}
    assert "q01 ... q99" in section
    missing = [n for n in sorted(named - quantiles) if not _defined(n, section)]
    assert missing == []


def _defined(name: str, section: str) -> bool:
    lines = [line for line in section.splitlines() if line.startswith("    ")]
    return any(name in line[4:].replace(",", " ").split() for line in lines)


def test_all_that_can_be_captured_is_explained(page: str) -> None:
    section = page.split("### NodeSpec\n")[1].split("\n### ")[0]
    text = section.split("What to record for each selected module.")[1]
    assert [name for name in get_args(CaptureName) if f"`{name}`" not in text] == []
    assert [end for end in ENDS if end not in page] == []


def test_every_preset_command_and_function_is_listed(page: str) -> None:
    for name in presets():
        assert f"### `{name}`\n" in page
    for name in get_command(app).commands:  # type: ignore[attr-defined]
        assert f"### `comgra-decl {name}`\n" in page
    for name in comgra_decl.__all__:
        assert f"### `comgra_decl.{name}`\n" in page


def test_what_has_no_docstring_is_refused() -> None:
    def nothing() -> None: ...

    with pytest.raises(reference.UndocumentedError, match="nothing"):
        reference._doc(nothing, "nothing")


def test_every_variable_of_the_environment_that_is_for_users_is_documented() -> None:
    """Arguments that the entry points pass to each other are not for users."""
    between_doors = {"COMGRA_RECORDED_BY", "COMGRA_CHECKED"}
    package = Path(comgra_decl.__file__).parent
    sources = [p.read_text() for p in package.rglob("*.py")]
    named = {name for text in sources for name in re.findall(r'"(COMGRA[A-Z_]*)"', text)}
    page = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    assert {"COMGRA", "COMGRA_OVERRIDES", "COMGRA_VIEW_AUTH"} <= named
    assert {name for name in named - between_doors if f"`{name}`" not in page} == set()


@pytest.mark.parametrize("kind", [Run, Slot])
def test_the_page_on_reading_lists_all_properties_and_methods(kind: type) -> None:
    page = (reference.PAGE.parent / "reading.md").read_text()
    names = [name for name in dir(kind) if not name.startswith("_")]
    static = {name: inspect.getattr_static(kind, name) for name in names}
    for title, wanted in (("Properties", True), ("Methods", False)):
        (line,) = re.findall(rf"^- {title} of `{kind.__name__}`: (.*)\.$", page, re.MULTILINE)
        there = {n for n, member in static.items() if isinstance(member, property) is wanted}
        listed = re.findall(r"`(\w+)`", line)
        assert listed == sorted(set(listed) | there)
        assert set(listed) - there <= _set_in_constructors(kind)


def _set_in_constructors(kind: type) -> set[str]:
    """Returns the names of attributes."""
    made = [vars(each).get("__init__") for each in kind.__mro__[:-1]]
    sources = [inspect.getsource(each) for each in made if each is not None]
    return set(re.findall(r"self\.(\w+)(?:: [^=]+)? = ", "".join(sources)))
