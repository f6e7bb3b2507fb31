"""A run to view with many attention heads: a transformer that is traced while it trains."""

from __future__ import annotations

from pathlib import Path

import torch

import comgra_decl
from benchmarks.nets import Gpt, next_token_loss

LAYERS, HEADS, TOKENS, RECORDS = 12, 12, 128, 30
SAMPLES = 2
_WIDTH, _VOCABULARY = 144, 64
_OVERRIDES = (
    f"schedule.first={RECORDS}",
    f"samples.count={SAMPLES}",
    f"values.max_elements={HEADS * TOKENS * TOKENS}",
    f"probes.sequences={{samples: {{count: {SAMPLES}}}, schedule: {{every: 1}}}}",
    "rules=off",
)


def made_heads(folder: Path) -> Path:
    """Return the root that contains only the run with heads, recorded if necessary.

    Each of its 30 records has the attention weights of 12 layers with 12 heads, of two samples
    with 128 tokens, at a training step and in a probe with the pictures of the preset `language`.
    """
    root = folder / f"heads-{LAYERS * HEADS}"
    done = root / "done"
    if not done.exists():
        _train(root)
        done.touch()
    return root


def _train(root: Path) -> None:
    torch.manual_seed(0)
    model = Gpt(tokens=_VOCABULARY, width=_WIDTH, blocks=LAYERS, heads=HEADS, context=TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    overrides = [*_OVERRIDES, f"run={{group: group, name: {root.name}}}"]
    with comgra_decl.trace("language", root=root, overrides=overrides):
        for _ in range(RECORDS):
            text = torch.randint(0, _VOCABULARY, (4, TOKENS + 1))
            optimizer.zero_grad()
            next_token_loss(model(text[:, :-1]), text[:, 1:]).backward()
            optimizer.step()
