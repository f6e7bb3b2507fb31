"""The cheat sheet and the pages for users of other tools run as written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import comgra_decl as comgra

DOCS = Path(__file__).parents[2] / "docs"


PAGES = ("trackers", "transformerlens", "nnsight", "pyvene")


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / f"coming-from-{page}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    if "from transformers" in text:
        pytest.importorskip("transformers")
    assert len(blocks) >= 2
    namespace: dict[str, object] = {"__name__": page}
    for code in blocks:
        exec(compile(code, page, "exec"), namespace)


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
