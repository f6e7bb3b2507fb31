"""The pages for users of other tools run as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["coming-from-trackers.md", "coming-from-transformerlens.md"])
def test_every_block_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert len(blocks) >= 2
    namespace: dict[str, object] = {"__name__": page}
    for code in blocks:
        exec(compile(code, page, "exec"), namespace)
