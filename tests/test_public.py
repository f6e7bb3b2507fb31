"""The public API of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

import comgra_decl
from tests.support.programs import python

HEAVY = ("torch", "numpy", "pandas", "pydantic", "omegaconf", "hydra", "panel", "bokeh",
         "holoviews", "tensorstore", "typer", "rich")  # fmt: skip


@pytest.mark.parametrize(
    "module", ["comgra_decl", "comgra_decl.errors", "comgra_decl.doors", "comgra_decl.configs"]
)
def test_importing_it_imports_nothing_heavy(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = python(tmp_path, "-c", code)
    assert done.stdout.strip() == "[]", done.stderr


def test_hydra_finds_the_presets_without_importing_anything_else(tmp_path: Path) -> None:
    code = (
        "import sys, hydra_plugins.comgra_decl_search_path\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = python(tmp_path, "-c", code)
    assert set(eval(done.stdout)) <= {"hydra", "omegaconf"}, done.stderr


def test_every_public_name_exists() -> None:
    for name in comgra_decl.__all__:
        assert getattr(comgra_decl, name) is not None
        assert name in dir(comgra_decl)


def test_a_missing_name_raises_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = comgra_decl.nonsense  # type: ignore[attr-defined]
