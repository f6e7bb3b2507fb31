"""What is missing is told from what is broken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from comgra_decl.errors import MissingPackageError, needed


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which modules are imported; what is imported is forgotten afterwards."""
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("module", ["nowhere_c", "nowhere_c.inner"])
def test_a_missing_package_is_called_missing(module: str) -> None:
    with pytest.raises(MissingPackageError, match=r"'nowhere_c' package is required but not inst"):
        needed(module, "some")


def test_a_folder_of_the_same_name_is_no_package(packages: Path) -> None:
    (packages / "nowhere_c").mkdir()  # as W&B and trackio create beside the program
    for _ in range(2):
        with pytest.raises(MissingPackageError, match=r"pip install 'comgra-decl\[some\]'"):
            needed("nowhere_c", "some")
    assert "nowhere_c" not in sys.modules


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("from json import service", "ImportError: cannot import name 'service' from 'json'"),
        ("import nowhere_d", "ModuleNotFoundError: No module named 'nowhere_d'"),
    ],
)
def test_a_package_that_cannot_be_imported_is_called_broken(
    content: str, message: str, packages: Path
) -> None:
    (packages / "nowhere_c.py").write_text(content)
    with pytest.raises(MissingPackageError) as raised:
        needed("nowhere_c", "some")
    said = str(raised.value)
    assert said.startswith("the 'nowhere_c' package is installed, but importing it fails: ")
    assert message in said


def test_a_package_that_is_there_is_imported() -> None:
    assert needed("json.decoder", "some") is sys.modules["json.decoder"]
