"""What a run reports about its declaration, what was recorded, and what its modules are."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from tests.hooks.tiny import net, step
from tests.support.recording import recording


def test_what_was_declared_and_did_not_happen_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(3, 3)
            self.unused = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    nodes = {
        "all": {"select": "**", "capture": ["output"]},
        "typo": {"select": "usde", "capture": ["output"]},
    }
    model = Idle()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "comgra_decl"), recording(nodes=nodes) as run:
        step(model, optimizer)
        step(model, optimizer)
    entries = run.report["entries"]
    assert (entries["all"]["matched"], entries["all"]["fired"]) == (3, 2)
    assert entries["all"]["never_called"] == ["unused"]
    assert (entries["typo"]["matched"], entries["typo"]["written"]) == (0, 0)
    assert len(run.report["unmatched"]) == 1
    assert "usde" in run.report["unmatched"][0]
    assert "'used'" in run.report["unmatched"][0]
    assert caplog.text.count("selected but not called in this step: unused") == 1


def test_the_report_counts_what_each_entry_wrote() -> None:
    nodes = {
        "outputs": {"select": "**", "capture": ["output", "output_grad"]},
        "weights": {"select": "**", "capture": ["parameter", "parameter_grad"]},
    }
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(nodes=nodes) as run:
        step(model, optimizer)
    outputs, weights = run.report["entries"]["outputs"], run.report["entries"]["weights"]
    assert (outputs["matched"], outputs["fired"], outputs["written"]) == (3, 3, 6)
    assert (weights["matched"], weights["fired"], weights["written"]) == (3, 2, 8)


def test_a_tensor_that_cannot_be_reduced_is_reported_and_the_rest_recorded() -> None:
    class Shapes(nn.Module):
        """Asks one of its layers only for the shape of its output."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.shape = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.linear(x)
            assert self.shape(result.to("meta")).shape == result.shape
            return result

    model = Shapes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        step(model, optimizer)
    assert run.faults == []
    assert run.has("linear")
    assert not run.has("shape")
    (refused,) = run.report["refused"].items()
    assert refused[0] == "shape output"
    assert "meta" in refused[1]
    assert any("shape output is not recorded" in text for text in run.report["warnings"])


def test_modules_document_lists_every_module_with_its_parameters() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        step(model, optimizer)
    modules = {m["path"]: m for m in run.steps[0].documents["modules"]}
    assert set(modules) == {"", "0", "1"}
    assert modules["1"]["class"] == "Linear"
    assert modules["1"]["parameters"]["weight"] == {
        "shape": [2, 3],
        "count": 6,
        "trainable": True,
        "optimized": True,
        "tied_to": None,
    }


def test_parts_of_what_is_gone_when_its_step_ends_are_described() -> None:
    """Like the wrapper that an integrator puts around a model for one call."""
    inner = net()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    with recording() as run:
        for _ in range(2):
            nn.Sequential(inner)(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    assert run.faults == []
    modules = {m["node"]: m for m in run.steps[0].documents["modules"]}
    assert [m["class"] for m in modules.values()] == ["Sequential", "Sequential", *["Linear"] * 2]
    assert modules["0.1"]["parameters"]["weight"]["shape"] == [2, 3]
    assert {"0.0", "0.1"} <= run.nodes()


class Listing(nn.Module):
    """Calls modules that are not parts of it, and one that becomes a part in the meantime."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first = nn.Linear(3, 3)
        self.blocks = [nn.Bilinear(3, 3, 3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.way == "list":
            return torch.as_tensor(self.blocks[0](x, x))
        made = nn.Bilinear(3, 3, 3)
        if self.way == "kept" and not hasattr(self, "made"):
            self.made = made
        return torch.as_tensor((self.made if self.way == "kept" else made)(x, x))


@pytest.mark.parametrize("way", ["list", "anew", "kept"])
def test_modules_that_are_no_part_of_a_model_are_said(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Listing(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING), recording() as run:
        for _ in range(3):
            step(model, optimizer)
    assert run.faults == []
    said = [r.getMessage() for r in caplog.records if "not registered in it" in r.getMessage()]
    assert len(said) == (way != "kept")
    assert all(
        text.startswith("called inside a model but not registered in it: Bilin") for text in said
    )
    assert run.has("made", step=1) == (way == "kept")


def test_a_module_that_is_not_selected_is_a_part_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nodes = {"last": {"select": "1", "capture": ["output"]}}
    with caplog.at_level(logging.WARNING), recording({"nodes": nodes}) as run:
        step(model, optimizer)
    assert run.faults == []
    assert "not registered in it" not in caplog.text


def test_modules_of_a_model_that_is_gone_are_still_described() -> None:
    """Folds, one after another, none of which is kept."""
    with recording() as run:
        for width in (3, 4):
            model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step(model, optimizer)
            del model, optimizer
    described = [s.documents["modules"] for s in run.steps if "modules" in s.documents][-1]
    shapes = {m["node"]: m["parameters"]["weight"]["shape"] for m in described if m["parameters"]}
    assert shapes["0"] == [3, 3]
    assert shapes["Sequential#2.0"] == [4, 3]


def test_the_projection_of_attention_that_torch_never_calls_is_not_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = {"all": {"select": "**", "capture": ["output"]}}
    model = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "comgra_decl"), recording(nodes=nodes) as run:
        for _ in range(2):
            model(torch.randn(2, 3, 4)).square().sum().backward()
            optimizer.step()
    assert run.report["entries"]["all"]["never_called"] == ["self_attn.out_proj"]
    assert "self_attn.out_proj" not in caplog.text
