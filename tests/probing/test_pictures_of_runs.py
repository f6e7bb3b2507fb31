"""Pictures computed from the records of a run, without torch and without the model."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA  # type: ignore[import-untyped]
from sklearn.linear_model import RidgeClassifier  # type: ignore[import-untyped]
from sklearn.metrics import confusion_matrix  # type: ignore[import-untyped]
from torch import nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import SelectionError, SpecError, UnknownNameError
from comgra_decl.pictures import likeness
from comgra_decl.query import Run
from comgra_decl.records import COMPUTED_PICTURES
from comgra_decl.spec import load_spec

EYES = "probe:eyes"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 3)
        self.act = nn.ReLU()
        self.head = nn.Linear(5, 3)
        with torch.no_grad():
            assert self.conv.bias is not None
            self.conv.bias[2] = -50.0  # a unit that is always dead

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.act(self.conv(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    spec: dict[str, Any] = {
        "nodes": {
            "all": {
                "select": "**",
                "capture": ["output", "output_grad", "parameter"],
                "values": True,
            }
        },
        "schedule": {"first": 100},
        "samples": {"count": 12, "by": "target"},
        "probes": {"eyes": {"samples": {"count": 12, "by": "target"}, "schedule": {"every": 2}}},
        "pictures": {
            "cam": {"method": "grad_cam", "of": "eyes", "select": ["conv", "act"]},
        },
    }
    with comgra.trace(spec, root=tmp_path_factory.mktemp("runs")) as session:
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(12, 1, 6, 6)), torch.arange(12) % 3).backward()
            optimizer.step()
    assert session.path is not None
    return comgra.open_run(session.path)


def test_names_are_those_of_the_spec_followed_by_what_records_give(run: Run) -> None:
    assert run.pictures[0] == "cam"
    assert run.pictures[1:] == [*COMPUTED_PICTURES]


def test_a_cloud_has_one_basis_for_all_steps(run: Run) -> None:
    found = run.embedding("conv")
    values = np.stack([run.value("conv", s, type=EYES).reshape(12, -1) for s in (0, 2, 4)])
    flat = values.reshape(36, -1).astype(np.float64)
    wanted = PCA(2, svd_solver="full").fit_transform(flat).reshape(3, 12, 2)
    np.testing.assert_allclose(found.values, wanted, atol=1e-9)
    assert found.axes == ("step", "sample", "component")
    assert found.labels["step"] == [0, 2, 4]
    assert found.basis is not None
    again = run.embedding("conv", found.basis)
    assert (again.values == found.values).all()
    assert run.embedding("conv", "last").basis is not None
    with pytest.raises(SelectionError, match=r"the basis is that of 'conv', whose features"):
        run.embedding("head", found.basis)
    anywhere = replace(found.basis, node="")
    assert (run.embedding("conv", anywhere).values == found.values).all()
    with pytest.raises(SelectionError, match=r"the basis has \d+ features, but 'head' has 3"):
        run.embedding("head", anywhere)


def test_over_fifty_records_a_cloud_moves_as_the_values_do(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    eyes = {"samples": {"count": 12, "by": "target"}, "schedule": {"every": 1}}
    spec: dict[str, Any] = {
        "nodes": {"all": {"select": "**"}},
        "samples": {"count": 12},
        "schedule": {"first": 100},
        "probes": {"eyes": eyes},
    }
    with comgra.trace(spec, root=tmp_path) as session:
        for _ in range(50):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(24, 4)), torch.arange(24) % 3).backward()
            optimizer.step()
    assert session.path is not None
    run = comgra.open_run(session.path)
    points = run.embedding("1").values
    values = np.stack([run.value("1", s, type=EYES) for s in range(50)]).astype(np.float64)

    def moved(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        spread = np.sqrt(np.square(x - x.mean((0, 1))).sum(-1).mean())
        return np.linalg.norm(np.diff(x, axis=0), axis=-1).mean(1) / spread

    assert (moved(points) <= 1.3 * moved(values)).all()
    centred = points - points.mean(1, keepdims=True)
    assert ((centred[1:] * centred[:-1]).sum(1) > 0).all()  # no axis flips


@pytest.mark.parametrize("returned", [tuple, lambda pair: {"logits": pair[0], "more": pair[1]}])
def test_the_first_of_several_outputs_is_the_prediction(
    returned: Callable[[Any], Any], tmp_path: Path
) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.inner(x).relu()
            return returned((self.head(hidden), hidden))

    nodes = {"all": {"select": "**", "values": True}}
    spec = {"nodes": nodes, "probes": {"eyes": {"samples": {"count": 6, "by": "target"}}}}
    torch.manual_seed(0)
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with comgra.trace({**spec, "schedule": {"every": 1}}, root=tmp_path) as session:
        for _ in range(2):
            out = model(torch.randn(12, 4))
            logits = out["logits"] if isinstance(out, dict) else out[0]
            F.cross_entropy(logits, torch.arange(12) % 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    recorded = comgra.open_run(session.path or "")
    assert recorded.picture("confusion").values.sum() == 6
    assert recorded.picture("reliability").values[:, 2].sum() == 6


def test_likeness_is_cka_of_the_recorded_values(run: Run) -> None:
    picture = run.picture("likeness", 2)
    names = picture.labels["node"]
    assert {"conv", "act", "head", "Net"} == {*names}
    for i, one in enumerate(names):
        for j, other in enumerate(names):
            wanted = likeness.cka(run.value(one, 2, type=EYES), run.value(other, 2, type=EYES))
            assert picture.values[i, j] == pytest.approx(wanted, rel=1e-12)
    between = picture.values[names.index("conv"), names.index("act")]
    assert run.similarity("conv", "act", 2) == pytest.approx(between, rel=1e-12)
    over = run.picture("likeness_over_steps", node="act")
    assert over.values.shape == (3, 3)
    np.testing.assert_allclose(np.diag(over.values), 1)


def test_confusions_are_counted_at_each_step(run: Run) -> None:
    found = run.picture("confusion")
    assert found.axes == ("step", "class", "predicted class")
    for step, counts in zip(found.labels["step"], found.values, strict=True):
        labels = [int(label) for label in run.samples(step, type=EYES)["label"]]
        predicted = run.value("Net", step, type=EYES).argmax(1)
        assert (counts == confusion_matrix(labels, predicted, labels=range(3))).all()
    assert run.picture("confusion", 4).values.shape == (1, 3, 3)


def test_calibration_covers_every_sample(run: Run) -> None:
    found = run.picture("reliability")
    assert found.step == 4
    assert found.values[:, 2].sum() == 12


def test_a_linear_model_is_fitted_for_each_layer_and_step(run: Run) -> None:
    found = run.picture("linear_probe")
    assert found.facts == {"fitted": [6] * 3, "tested": [6] * 3}
    for i, step in enumerate(found.labels["step"]):
        labels = np.array([int(label) for label in run.samples(step, type=EYES)["label"]])
        at = [np.flatnonzero(labels == cls) for cls in range(3)]
        fitted, tested = (np.concatenate([each[half::2] for each in at]) for half in (0, 1))
        for j, node in enumerate(found.labels["node"]):
            values = run.value(node, step, type=EYES).reshape(12, -1).astype(np.float64)
            wanted = RidgeClassifier(alpha=1.0).fit(values[fitted], labels[fitted])
            assert found.values[i, j] == wanted.score(values[tested], labels[tested])


def test_dead_units_are_those_that_are_never_above_zero(run: Run) -> None:
    found = run.picture("dead_units", node="act")
    assert found.axes == ("unit", "step")
    wanted = np.stack(
        [(run.value("act", s, type=EYES) <= 0).all((0, 2, 3)) for s in (0, 2, 4)], axis=1
    )
    assert (found.values == wanted).all()
    assert found.values[2].all()


def test_a_spectrum_has_the_singular_values_of_the_weight_at_each_step(run: Run) -> None:
    found = run.picture("spectrum", node="head")
    for step, values in zip(found.labels["step"], found.values, strict=True):
        weight = run.slot("head", role="weight").value(step)[0]
        wanted = np.linalg.svd(weight.astype(np.float64), compute_uv=False)
        np.testing.assert_allclose(values, wanted, rtol=1e-10)


def test_flow_is_the_norm_of_each_gradient_in_the_order_of_the_calls(run: Run) -> None:
    found = run.picture("flow", 3)
    assert found.labels["node"] == ["conv", "act", "head", "Net"]
    for node, norm in zip(found.labels["node"], found.values, strict=True):
        assert norm == pytest.approx(run.slot(node).grad.series("l2")[3])
    assert np.array_equal(run.picture("flow", 3, type="train"), found)


def test_the_cam_of_the_loss_needs_no_model(run: Run) -> None:
    found = run.picture("loss_cam", 5, "conv")
    output, gradient = run.value("conv", 5), run.slot("conv").grad.value(5)
    wanted = (gradient.astype(np.float64).mean((2, 3), keepdims=True) * output).sum(1)
    np.testing.assert_allclose(found.values, wanted, rtol=1e-12)
    assert found.axes == ("sample", "height", "width")


MISTAKES: dict[str, tuple[Callable[[Run], Any], str]] = {
    "unknown": (lambda run: run.picture("camm"), "did you mean 'cam'"),
    "several nodes": (lambda run: run.picture("cam"), "pass node, one of 'conv', 'act'"),
    "other node": (lambda run: run.picture("cam", node="head"), "does not show 'head'"),
    "no node": (lambda run: run.picture("dead_units"), "shows one node; pass node"),
    "no step": (lambda run: run.picture("cam", 3, "conv"), "step 3 was not recorded"),
    "no places": (lambda run: run.picture("loss_cam", 3, "head"), "no places to map"),
    "no classes": (
        lambda run: run.picture("confusion", node="conv"),
        r"has the shape \(12, 5, 4, 4\), not \[samples, classes\]",
    ),
    "other probe": (
        lambda run: run.picture("cam", node="conv", type="train"),
        "'cam' belongs to 'probe:eyes', not 'train'; omit `type`",
    ),
    "no gradients": (
        lambda run: run.picture("flow", type=EYES),
        "no gradients were recorded with type 'probe:eyes'",
    ),
    "basis": (lambda run: run.embedding("conv", "first"), "is not 'all', 'last' or a basis"),
    "axes": (lambda run: run.embedding("target"), "no values|has no cloud|role"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_what_cannot_be_shown_says_why(run: Run, case: str) -> None:
    ask, why = MISTAKES[case]
    with pytest.raises(UnknownNameError, match=why):
        ask(run)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7)
        self.value = nn.Linear(4, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        self.value(hidden)
        return self.head(hidden)[:, -1]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A language model with one sample of each class, and pictures of which some cannot be made."""
    torch.manual_seed(0)
    model = Tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    spec: dict[str, Any] = {
        "nodes": {"all": {"select": "**", "capture": ["output"], "values": True}},
        "probes": {"words": {"samples": {"count": 3, "by": "target"}}},
        "pictures": {
            "lens": {"method": "logit_lens", "of": "words", "select": "embed"},
            "worth": {"method": "logit_lens", "of": "words", "select": "embed", "head": "value"},
            "hidden": {"method": "occlusion", "of": "words", "window": [2, 2]},
            "cam": {"method": "grad_cam", "of": "words", "select": "embedd", "optional": True},
            "dream": {"method": "maximise", "of": "words", "select": "conv", "optional": True},
        },
        "rules": "off",
    }
    with comgra.trace(spec, root=tmp_path_factory.mktemp("runs")) as session:
        for _ in range(2):
            optimizer.zero_grad()
            given = torch.arange(15).reshape(3, 5) % 7
            F.cross_entropy(model(given), torch.arange(3)).backward()
            optimizer.step()
    assert session.path is not None
    return comgra.open_run(session.path)


def test_a_lens_has_an_axis_of_positions(tokens: Run) -> None:
    found = tokens.picture("lens")
    assert (found.axes, found.values.shape) == (("sample", "position"), (3, 5))


REFUSED = {
    "worth": "at step 0: 'value' returns one number at each position.* head: lm_head",
    "hidden": "at step 0: the input is tokens, so that a window covers positions: write `window: ",
    "cam": "at step 0: select: 'embedd' matches no module.*did you mean 'embed'",
    "linear_probe": r"two samples; those of step 0 have the classes \[0, 1, 2\]",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_picture_that_could_not_be_made_says_why(tokens: Run, name: str) -> None:
    with pytest.raises(UnknownNameError, match=f"(?s){REFUSED[name]}"):
        tokens.picture(name)
    assert name not in tokens.pictures or name in COMPUTED_PICTURES


def test_a_picture_has_no_name_of_a_computed_one() -> None:
    spec = {"probes": {"p": {}}, "pictures": {"flow": {"method": "saliency", "of": "p"}}}
    with pytest.raises(SpecError, match=r"pictures.flow: every run has a picture called 'flow'"):
        load_spec(spec)


class Noisy(nn.Module):
    """Draws from all generators, and counts its calls; its last two inputs have no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.second = nn.Linear(8, 2)
        self.generator = torch.Generator().manual_seed(1)
        self.register_buffer("calls", torch.zeros(()))
        with torch.no_grad():
            self.first.weight[:, 3:] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls: torch.Tensor = self.calls + 1
        hidden = F.dropout(self.first(x), 0.5)
        hidden = hidden * (torch.rand(8, generator=self.generator) + random.random())
        return self.second(hidden.relu() * np.random.rand()) + self.calls


def test_all_passes_of_a_picture_draw_the_same_random_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 5)
    spec: dict[str, Any] = {
        "nodes": {"all": {"select": "**", "capture": ["output"]}},
        "probes": {"p": {"mode": "train", "samples": {"count": 4}}},
        "pictures": {
            "hide": {"method": "occlusion", "of": "p", "window": [1], "target": 1},
            "ig": {"method": "integrated_gradients", "of": "p", "target": 1, "points": 200},
            "slope": {"method": "input_x_gradient", "of": "p", "target": 1},
            "cam": {"method": "saliency", "of": "p", "target": 1},
        },
        "rules": "off",
    }
    with comgra.trace(spec, root=tmp_path) as session:
        model(x).square().mean().backward()
        optimizer.step()
    assert session.path is not None
    found = comgra.open_run(session.path)
    assert not found.picture("hide").values[:, 3:].any(), "inputs without effect"
    assert found.picture("hide").values[:, :3].any()
    assert np.abs(found.picture("ig").facts["gap"]).max() < 1e-2
    slope = np.abs(found.picture("slope").values)
    saliency = found.picture("cam").values * np.abs(x[:4].numpy())
    np.testing.assert_allclose(slope, saliency, rtol=1e-6)


_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from comgra_decl.query import open_run
run = open_run(sys.argv[1])
for name in ("likeness", "confusion", "reliability", "linear_probe", "flow"):
    assert run.picture(name).values.size
units = ("dead_units", "top_samples", "unit_effects", "coactivation")
clouds = ("concept_vectors", "concept_derivatives", "separability")
layers = ("loss_cam", "feature_maps", "filters", "spectrum", "likeness_over_steps")
for name in ("cam", *layers, *units, *clouds):
    assert run.picture(name, node="conv").values.size
assert run.embedding("conv").values.size
"""


def test_pictures_are_read_where_torch_is_not_installed(run: Run) -> None:
    code = [sys.executable, "-c", _WITHOUT_TORCH, str(run.path)]
    done = subprocess.run(code, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


PICTURES: dict[str, dict[str, Any]] = {
    "cam": {"method": "grad_cam", "select": "convv"},
    "guided": {"method": "guided_grad_cam", "select": ["conv", "convv"]},
    "inside": {"method": {"_target_": "captum.attr.LayerGradCam"}, "select": "convv"},
    "lens": {"method": "logit_lens", "select": "convv"},
    "bend": {"method": "hessian", "select": {"class": "Conv3d"}},
    "slice": {"method": "loss_slice", "select": {"regex": "convv"}},
}


def test_a_pattern_that_matches_nothing_ends_the_program_before_its_first_forward_pass(
    tmp_path: Path,
) -> None:
    model = Net()
    calls: list[object] = []
    model.conv.register_forward_hook(lambda *_: calls.append(1))
    spec = {
        "probes": {"eyes": {"samples": {"count": 2}}},
        "pictures": {name: {"of": "eyes", **each} for name, each in PICTURES.items()},
        "samples": {"count": 2},
    }
    with pytest.raises(SystemExit) as ended, comgra.trace(spec, root=tmp_path):
        model(torch.randn(3, 1, 6, 6))
    message = str(ended.value)
    assert not calls
    assert message.startswith("comgra: the spec has 6 problems:")
    for name in PICTURES:
        assert f"comgra.pictures.{name}.select: " in message
    assert "'convv' matches no module; modules at the top: conv, act, head; did you mean" in message
    assert "Conv2d" in message


def test_a_call_that_is_looked_at_says_which_pattern_matches_nothing() -> None:
    cam = {"method": "grad_cam", "select": "convv"}
    found = comgra.look(Net(), torch.randn(2, 1, 6, 6), pictures={"cam": cam})
    with pytest.raises(UnknownNameError, match="'convv' matches no module"):
        found.picture("cam", node="conv")
