"""The compatibility page names the same oldest versions as the package's requirements."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_oldest_versions_tested_are_the_bounds() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    section = page.partition("### The oldest versions allowed")[2].partition("\n\n")[2]
    tested = dict(re.findall(r"([a-z][\w-]+) (\d+(?:\.\d+)+)", section.partition("\n\n")[0]))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for requirement in project["dependencies"]:
        name, bound = re.findall(r"^([\w-]+)>=([\d.]+)", requirement)[0]
        assert numbers(tested[name])[: len(numbers(bound))] == numbers(bound), name


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]
