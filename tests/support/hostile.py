"""A run in which all names try to be interpreted as markup or control sequences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import comgra_decl as comgra

HTML = "<img src=x onerror=pwned=1>"
TEX = "$$\\htmlData{a=b}{tex}$$"
TEX_TOO = "\\(x^2\\) \\[y\\]"
TERMINAL = "esc\x1b[31mred\x1b]0;title\x07\x9b2J"
REVERSED = "user\u202eeulb\u2066\u200f"
UNSEEN = "zero\u200bwidth\u2028line"
TEMPLATE = "@{pwned}{custom} ${pwned=2} {{7*7}}"
NAMES = (HTML, TEX, TEX_TOO, TERMINAL, REVERSED, UNSEEN, TEMPLATE)

RAW = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
"""Regular expression of characters that must not reach a page or a terminal."""


class Hostile(nn.Module):
    """A chain of layers with such names."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.add_module(name.replace(".", "_"), nn.Linear(4, 4))
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all layers."""
        for name in NAMES:
            x = torch.relu(getattr(self, name.replace(".", "_"))(x))
        return self.out(comgra.node(x, f"{HTML}{REVERSED}{TEX}"))


Hostile.__qualname__ = f"Hostile{TERMINAL}"


def record(
    root: Path, *, name: str = "run", steps: int = 12, overrides: Sequence[str] = ()
) -> Path:
    """Record such a run, with findings, and return its folder."""
    group = f"{TERMINAL}{REVERSED}$$x$${HTML}"
    torch.manual_seed(0)
    with comgra.trace("debug", root=root, group="group", name=name, overrides=overrides) as session:
        model = Hostile()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            loss = nn.functional.cross_entropy(model(torch.randn(6, 4)), torch.randint(3, (6,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for text in NAMES:
                comgra.kpi(text, float(step))
            comgra.note(f"{NAMES[step % len(NAMES)]} says")
            if step == steps // 2:
                for parameter in model.parameters():
                    parameter.data.fill_(float("nan"))
    assert session.path is not None
    (root / group).mkdir(
        exist_ok=True
    )  # comgra_decl refuses these names, but folders may have them
    return (root / "group" / name).rename(root / group / f"{name}{UNSEEN}")
