"""The logit lens from records equals that of the probe, which puts values through the modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Run
from tests.probing.test_lens import TOKENS, Language, words


def trained(
    root: Path, last: nn.Module, *, dtype: torch.dtype = torch.float32, **nodes: Any
) -> Run:
    torch.manual_seed(0)
    model = Language(last).to(dtype)
    for parameter in last.parameters():  # so that weights and biases matter
        nn.init.normal_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    lens = {"method": "logit_lens", "of": "eyes", "select": "blocks.*"}
    spec: dict[str, Any] = {
        "nodes": {
            "all": {"select": "**", "capture": ["output", "parameter"], "values": True, **nodes}
        },
        "schedule": {"first": 100},
        "probes": {"eyes": {"samples": {"count": 3}, "schedule": {"every": 2}}},
        "pictures": {"lens": lens},
        "rules": "off",
    }
    with comgra.trace(spec, root=root) as session:
        for _ in range(3):
            optimizer.zero_grad()
            logits = model(words())["logits"]
            F.cross_entropy(logits[:, :-1].flatten(0, 1), words()[:, 1:].flatten()).backward()
            optimizer.step()
    assert session.path is not None
    return comgra.open_run(session.path)


class Gemma(nn.Module):
    """An RMS norm whose weight counts from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class GemmaNorm(Gemma):
    """Its class has the word in its name, as in transformers."""


LAST: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(8),
    "another eps": lambda: nn.LayerNorm(8, eps=0.1),
    "without weights": lambda: nn.LayerNorm(8, elementwise_affine=False),
    "rms norm": lambda: nn.RMSNorm(8),
    "from one": GemmaNorm,
    "none": nn.Identity,
}


@pytest.mark.parametrize("last", LAST)
def test_it_equals_the_lens_of_the_probe_at_each_layer_and_step(last: str, tmp_path: Path) -> None:
    run = trained(tmp_path, LAST[last]())
    for step in (0, 2):
        whole = run.picture("lens_from_records", step)
        assert whole.axes == ("node", "sample", "position")
        assert whole.labels["node"] == [f"blocks.{i}" for i in range(3)]
        assert whole.facts["head"] == "head"
        assert whole.facts["norm"] == (None if last == "none" else "last")
        for i, node in enumerate(whole.labels["node"]):
            wanted = run.picture("lens", step, node)
            found = run.picture("lens_from_records", step, node)
            np.testing.assert_allclose(found.values, wanted.values, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(found.facts["tokens"], wanted.facts["tokens"])
            np.testing.assert_array_equal(found.facts["ranks"], wanted.facts["ranks"])
            np.testing.assert_array_equal(whole.values[i], found.values)
            np.testing.assert_array_equal(whole.facts["tokens"][i], found.facts["tokens"])
            np.testing.assert_array_equal(whole.facts["ranks"][i], found.facts["ranks"])
            assert whole.facts["tokens"].max() < TOKENS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_is_that_of_the_recorded_values_in_double_precision(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    run = trained(tmp_path, nn.LayerNorm(8), dtype=dtype)

    def read(node: str, role: str = "output", type_: str = "probe:eyes") -> torch.Tensor:
        value = run.slot(node, role=role).value(0, type=type_).astype(np.float64)
        return torch.from_numpy(value if type_ == "probe:eyes" else value[0])

    picture = run.picture("lens_from_records", 0)
    top = read("head").argmax(-1, keepdim=True)
    weight = read("last", "weight", "train")
    for node, values in zip(picture.labels["node"], picture.values, strict=True):
        bias = read("last", "bias", "train")
        hidden = F.layer_norm(read(node, "output[0]"), [8], weight, bias, 1e-5)
        logits = hidden @ read("embed", "weight", "train").T  # which the head shares
        wanted = logits.log_softmax(-1).gather(-1, top)[..., 0]
        np.testing.assert_allclose(values, wanted, atol=1e-2)


class ScaledNorm(nn.LayerNorm):
    """A norm of another kind, which its weights do not describe."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


def test_a_norm_that_its_weights_do_not_describe_is_refused(tmp_path: Path) -> None:
    run = trained(tmp_path, ScaledNorm(8))
    with pytest.raises(UnknownNameError, match="no recorded norm leads from the last layer to"):
        run.picture("lens_from_records")
    assert run.picture("lens", node="blocks.0").values.shape == (3, 6)


def test_without_parameters_the_message_says_what_to_record(tmp_path: Path) -> None:
    run = trained(tmp_path, nn.LayerNorm(8), capture=["output"])
    with pytest.raises(UnknownNameError, match=r"no head was recorded.*output, parameter"):
        run.picture("lens_from_records")
