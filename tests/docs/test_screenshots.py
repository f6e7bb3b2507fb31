"""The screenshots of the documentation show what its commands record."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("playwright")

from docs.pictures import IMAGES, PICTURES, ROOT, command

README = (ROOT / "README.md").read_text(encoding="utf-8")
FOUND = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
PAGES = [README, *(page.read_text(encoding="utf-8") for page in FOUND)]
SHOWN = re.compile(r"!\[[^]]*\]\(docs/images/(\w+)\.png\)\s+```bash\n(.*?)```", re.DOTALL)


def test_the_picture_of_the_readme_shows_what_its_commands_record() -> None:
    found = SHOWN.search(README)
    assert found is not None
    name, block = found.groups()
    train, view = (shlex.split(line, comments=True) for line in block.splitlines())
    assert view == ["comgra-decl", "view", "runs"]  # what the script of the screenshots opens
    taken = command(str(PICTURES[name]["run"]), Path("runs"))
    script, *others = taken
    assert [train[0], train[1]] == ["python", Path(script).name]
    place = re.compile(r"hydra\.callbacks\.comgra\.run\.(root|group|name)=")
    recorded = [word for word in others if "comgra" in word and not place.match(word)]
    assert recorded == train[2:]


@pytest.mark.parametrize("name", [n for n in PICTURES if (IMAGES / f"{n}.png").exists()])
def test_every_screenshot_is_on_a_page(name: str) -> None:
    assert any(f"images/{name}.png)" in page for page in PAGES)
