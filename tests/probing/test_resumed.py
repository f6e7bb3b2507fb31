"""A resumed run goes on with the samples that its probes took from the first batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.query import Run

EYES = "probe:eyes"
KINDS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


@dataclass
class Given:
    """What a model receives besides a tensor; pytrees do not traverse it."""

    scale: Tensor  # [samples, 1]
    shift: Tensor  # [4], without samples
    times: float = 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, given: Given, *, token: Tensor) -> Tensor:
        x = x.float() * given.scale * given.times + given.shift + token[:, None]
        return self.head(torch.relu(self.first(x)))


def batch(step: int, size: int = 8) -> tuple[tuple[Tensor, Given], dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 4, generator=generator).bfloat16()
    given = Given(torch.rand(size, 1, generator=generator), torch.randn(4, generator=generator))
    tokens = torch.randint(5, (size,), generator=generator)
    return (x, given), {"token": tokens}, KINDS[:size].roll(step)


def train(steps: range, root: Path, *, size: int = 8, double: bool = False, **changes: Any) -> Run:
    """Train for some steps, in a new run or in the one that is there."""
    probe = {"samples": {"count": 3, "by": "target"}, "schedule": {"every": 1}, **changes}
    spec = {
        "nodes": {"all": {"select": "head"}},
        "probes": {"eyes": probe},
        "interventions": {
            "zero": {"of": "eyes", "select": "first", "do": "zero"},
            "label": {"of": "eyes", "select": "first", "do": "zero", "measure": "label"},
        },
        "run": {"root": str(root), "group": "g", "resume": True},
    }
    torch.manual_seed(steps.start)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comgra.trace(spec) as session:
        for step in steps:
            (x, given), kwargs, labels = batch(step, size)
            optimizer.zero_grad()
            logits = model(x.double() if double else x, given, **kwargs)
            F.cross_entropy(logits, labels).backward()
            optimizer.step()
    assert session.path is not None
    return comgra.open_run(session.path)


def warnings(run: Run) -> list[str]:
    return [text for text in run.document("report")["warnings"] if text.startswith("probe 'eyes'")]


@pytest.mark.parametrize("values", [True, False])
def test_all_sessions_of_a_run_probe_the_samples_of_its_first_batch(
    values: bool, tmp_path: Path
) -> None:
    for start in (0, 2, 4):
        run = train(range(start, start + 2), tmp_path, values=values)
    (x, given), kwargs, labels = batch(0)
    places = [0, 1, 2]
    for step in range(6):
        samples = run.samples(step, type=EYES)
        assert samples["place"].tolist() == places
        assert samples["label"].tolist() == ["0", "1", "2"]
        if (
            values or not step % 2
        ):  # a session that stores no others stores those of the inputs once
            wanted = {
                "input": x[places],
                "input[1].scale": given.scale[places],
                "input[1].shift": given.shift[None],
                "input.token": kwargs["token"][places],
            }
            for role, tensor in wanted.items():
                stored = run.slot("input", role=role).value(step, type=EYES)
                assert stored.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert warnings(run) == []

    torch.manual_seed(4)
    model = Net()  # as the last session began
    cut = Given(given.scale[places], given.shift)
    with torch.no_grad():
        before = model(x[places], cut, token=kwargs["token"][places])
        model.first.weight.zero_()
        model.first.bias.zero_()
        after = model(x[places], cut, token=kwargs["token"][places])
    loss = F.cross_entropy(after, labels[:3], reduction="none") - F.cross_entropy(
        before, labels[:3], reduction="none"
    )
    label = (after - before)[range(3), labels[:3]]
    for name, wanted_effects in (("zero", loss), ("label", label)):
        found = run.effects(name, 4)[[0, 1, 2]].to_numpy()[0]
        np.testing.assert_allclose(found, wanted_effects.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"samples": {"count": 2}}, "the spec asked for count: 3, by: target and now for count: 2"),
        ({"double": True}, "input was torch.bfloat16 [3, 4] and is now torch.float64 [3, 4]"),
    ],
)
def test_other_samples_are_reported(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    train(range(2), tmp_path)
    run = train(range(2, 4), tmp_path, **changes)
    (warning,) = warnings(run)
    assert warning.startswith("probe 'eyes': its samples are not those of the earlier sessions")
    assert why in warning


def test_a_probe_that_is_new_in_a_session_takes_samples_from_its_first_batch(
    tmp_path: Path,
) -> None:
    run = train(range(2), tmp_path, model="Other")
    assert EYES not in run.types
    run = train(range(2, 4), tmp_path)
    x = batch(2)[0][0]
    places = run.samples(2, type=EYES)["place"].tolist()
    stored = run.slot("input", role="input").value(3, type=EYES)
    assert (stored.astype(np.float32) == x[places].float().numpy()).all()
    assert [text for text in warnings(run) if "earlier sessions" in text] == []
