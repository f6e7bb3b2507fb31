"""A sweep counts each element once for each place, however many passes it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra

SAMPLES, WIDE, REST = 5, 4, 2


def negated(x: Tensor) -> Tensor:
    return -x


class ByPlace(nn.Module):
    """Treats samples by their place in the batch, so that no pass may repeat them."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.arange(1, len(x) + 1)[:, None] / len(x)


ZERO: dict[str, Any] = {"select": "0", "do": "zero", "sweep": "feature"}
FUNCTION = {"_target_": f"{negated.__module__}.negated"}
FIRST = [{"select": "2", "do": {"add": 1.0}}]
INTO: dict[str, Any] = {"into": {"select": "2", "role": "input"}}
ONE = {"tensors": 1, "elements": SAMPLES * WIDE, "changed": SAMPLES * WIDE}
HALF = {"tensors": 1, "elements": SAMPLES * REST, "changed": SAMPLES * REST}
ALSO = {"tensors": 1, "elements": SAMPLES * REST, "changed": SAMPLES * REST}

CASES: dict[str, tuple[dict[str, Any], list[dict[str, int]]]] = {
    "in one pass": (ZERO, [ONE]),
    "in several passes": ({**ZERO, "batch": 15}, [ONE]),
    "one place at a time": ({**ZERO, "batch": 5}, [ONE]),
    "by a function": ({**ZERO, "do": FUNCTION}, [ONE]),
    "in some parts": ({**ZERO, "parts": {"feature": [0, 3]}}, [HALF]),
    "estimated": ({**ZERO, "estimate": "gradient"}, [ONE]),
    "estimated in some parts": (
        {**ZERO, "estimate": "gradient", "parts": {"feature": [0, 3]}}, [HALF]
    ),
    "after another change": ({**ZERO, "first": FIRST}, [ALSO, ONE]),
    "after another change, one at a time": ({**ZERO, "first": FIRST, "batch": 5}, [ALSO, ONE]),
    "along paths": ({**ZERO, **INTO, "first": FIRST}, [ALSO, ONE]),
    "along paths, one at a time": ({**ZERO, **INTO, "first": FIRST, "batch": 5}, [ALSO, ONE]),
    "along paths, estimated": ({**ZERO, **INTO, "estimate": "gradient"}, [ONE]),
    "along paths, at once": (
        {"select": "0", "do": "zero", **INTO, "first": FIRST}, [ALSO, ONE]
    ),
}  # fmt: skip


QUICK = ("in several passes", "estimated in some parts", "along paths")


@pytest.mark.parametrize("by_place", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_each_element_counts_once_for_each_place(name: str, by_place: bool, tmp_path: Path) -> None:
    declared, expected = CASES[name]
    torch.manual_seed(0)
    middle = ByPlace() if by_place else nn.Tanh()
    model = nn.Sequential(nn.Linear(3, WIDE), middle, nn.Linear(WIDE, REST))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    spec = {
        "run": {"root": str(tmp_path)},
        "probes": {"eyes": {"samples": {"count": SAMPLES}}},
        "interventions": {"sweep": {"of": "eyes", **declared}},
    }
    with comgra.trace(spec) as session:
        for _ in range(2):
            loss = F.cross_entropy(model(torch.randn(6, 3)), torch.randint(REST, (6,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert session.path is not None
    facts = comgra.open_run(session.path).intervention_facts("sweep", 0)
    counted = [{key: each[key] for key in ONE} for each in facts["changes"]]
    assert counted == expected
    if "received" in facts:
        receivers = 1 if "sweep" not in declared else WIDE  # one value for each place
        assert facts["received"]["elements"] == SAMPLES * WIDE * receivers
        assert facts["received"]["tensors"] == 1
