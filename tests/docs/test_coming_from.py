"""The cheat sheet and the pages for users of other tools run as written."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import comgra_decl as comgra
from tests.support.shortened import shortened

DOCS = Path(__file__).parents[2] / "docs"


PAGES = ("trackers", "nnsight", "transformerlens", "pyvene")
PEERS = {"transformerlens": "transformer_lens", "nnsight": "nnsight", "pyvene": "pyvene"}
"""The packages that some blocks use; `make test-research` installs them."""


def written(page: str, *, without: str | None, to: Path) -> Path:
    """Write the blocks of a page to a program; leave out those that use a package."""
    text = (DOCS / f"coming-from-{page}.md").read_text()
    if "from transformers" in text:
        pytest.importorskip("transformers")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    uses = re.compile(rf"^(import|from) {without}\b", re.MULTILINE)
    kept = [code for code in blocks if without is None or not uses.search(code)]
    assert len(kept) >= 2
    program = to / f"{page}.py"  # a file, because nnsight reads the source of its traces
    program.write_text("\n".join(kept))
    return program


@pytest.mark.parametrize("page", shortened(PAGES, tried=2))
def test_every_block_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(written(page, without=PEERS.get(page), to=tmp_path)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PEERS)
def test_the_blocks_of_another_tool_give_the_same_on_the_same_weights(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(PEERS[page], reason="`make test-research` installs it")
    monkeypatch.chdir(tmp_path)
    program = written(page, without=None, to=tmp_path)
    assert PEERS[page] in program.read_text()
    runpy.run_path(str(program))


def code_of(section: str) -> list[str]:
    """Return the Python code in one section of the cheat sheet."""
    text = (
        (DOCS / "cheat-sheet.md").read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    )
    return re.findall(r"`([^`]+)`", text)


class Named(nn.Module):
    """Runs the lines about annotations within its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        names: dict[str, Any] = {
            "comgra": comgra,
            "x": self.a(x),
            "figure": Figure(),
            "text": "an output",
        }
        for code in code_of("Annotate"):
            if "image" in code:
                exec(code, names | {"x": IMAGE})
            elif code not in ("forward", '@comgra.node("attn")', "comgra.step()"):
                exec(code, names)
        out: torch.Tensor = self.b(names["x"])
        return out


IMAGE = np.zeros((8, 8))


def test_the_lines_of_the_cheat_sheet_annotate_and_read_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spec = {
        "nodes": {"all": {"select": "**", "capture": ["output", "output_grad"], "values": True}},
        "probes": {"fixed": {"samples": {"count": 4}, "schedule": {"every": 1}}},
        "pictures": {"cam": {"of": "fixed", "method": "saliency", "target": "top"}},
        "interventions": {"no_mlp": {"of": "fixed", "select": "a", "do": "zero", "measure": "top"}},
        "run": {"group": "train"},
        "schedule": {"first": 3},
    }
    with comgra.trace(spec):
        for _ in range(3):
            loss = model(torch.randn(6, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    run = comgra.open_run("runs")
    assert "memory" in run.nodes
    assert {"accuracy", "loss"} <= {*run.kpis()["name"]}
    names: dict[str, Any] = {"comgra": comgra, "run": run, "step": int(run.steps[-1])}
    for code in code_of("Read"):
        code = code.replace("blocks.0.mlp", "a").replace('"head"', '"b"')
        exec(code, names)
    assert names["slot"].node == "a"
