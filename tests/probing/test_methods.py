"""Pictures equal Captum's and explicit formulas for the same copy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from benchmarks.neutrality.zoo.kernels import declare_missing
from comgra_decl.errors import ProbeError
from comgra_decl.hooks.module_tree import named_modules
from comgra_decl.hooks.probing.copying import CleanCopy
from comgra_decl.hooks.probing.methods import drawn
from comgra_decl.hooks.probing.samples import Samples
from comgra_decl.hooks.probing.subject import Drawn, Subject
from comgra_decl.spec import load_spec
from comgra_decl.spec.pictures import PictureSpec

CLOSE = 1e-6
"""Largest difference, relative to the largest value."""


class Net(nn.Module):
    """Two convolutions; each ReLU as the module, the function or in place."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.relu1 = nn.ReLU(inplace=form == "in place")
        self.conv2 = nn.Conv2d(4, 5, 3)
        self.relu2 = nn.ReLU(inplace=form == "in place")
        self.head = nn.Linear(5, 3)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        functional = self.form == "function"
        x = self.bn(self.conv1(x))
        x = F.relu(x) if functional else self.relu1(x)
        x = self.conv2(x)
        x = F.relu(x, inplace=True) if functional else self.relu2(x)
        return self.head(x.flatten(2).mean(2))


def net(form: str = "module", dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    model = Net(form).to(dtype)
    model.bn.running_mean = torch.randn(4, dtype=dtype)
    return model.eval()


def subject_of(model: nn.Module, x: Tensor, classes: list[int] | None = None) -> Subject:
    labels = None if classes is None else torch.tensor(classes)
    copy = CleanCopy(model, {id(m): path for path, m in named_modules(model)})
    return Subject(copy, Samples((x,), {}, list(range(len(x))), [], labels))


def spec_of(**keys: Any) -> PictureSpec:
    probes = {"eyes": {"samples": {"count": 1}}}
    return load_spec({"probes": probes, "pictures": {"it": {"of": "eyes", **keys}}}).pictures["it"]


def picture(model: nn.Module, x: Tensor, labels: list[int] | None = None, **spec: Any) -> Drawn:
    return drawn(spec_of(**spec), subject_of(model, x, labels))


def values(model: nn.Module, x: Tensor, labels: list[int] | None = None, **spec: Any) -> Tensor:
    (only,) = picture(model, x, labels, **spec).maps
    return only.values.detach()


def same(found: Tensor, wanted: Tensor, tolerance: float = CLOSE) -> None:
    assert found.shape == wanted.shape
    scale = wanted.abs().max()
    assert scale > 0
    assert (found - wanted).abs().max() <= tolerance * scale


FORMS = pytest.mark.parametrize("form", ["module", "function", "in place"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@pytest.mark.parametrize("method", ["grad_cam", "saliency", "guided_grad_cam"])
def test_no_gradients_of_parameters_are_computed(method: str) -> None:
    subject = subject_of(net(), torch.randn(3, 2, 7, 6, dtype=torch.float64))
    computed: list[Tensor] = []
    parameters = [*subject.copy.module.parameters()]
    for parameter in parameters:
        parameter.register_hook(computed.append)
    layer = {} if method == "saliency" else {"select": "conv1"}
    drawn(spec_of(method=method, target=1, **layer), subject)
    assert computed == []
    with torch.enable_grad():
        subject.call().sum().backward()
    assert len(computed) == len(parameters)


@FORMS
@DTYPES
def test_pictures_equal_captum(form: str, dtype: torch.dtype) -> None:
    captum = pytest.importorskip("captum.attr")
    model = net(form, dtype)
    reference = net("module", dtype)  # the same weights; Captum's guided methods see modules only
    x, target = torch.randn(3, 2, 7, 6, dtype=dtype), 1

    def run(x: Tensor) -> Tensor:
        return reference(x)

    leaf = x.clone().requires_grad_()  # Captum warns otherwise
    given: dict[str, Any] = {"target": target}
    same(values(model, x, method="saliency", **given), captum.Saliency(run).attribute(leaf, target))
    same(
        values(model, x, method="input_x_gradient", **given),
        captum.InputXGradient(run).attribute(leaf, target),
    )
    for layer in ("conv1", "conv2"):
        same(
            values(model, x, method="grad_cam", select=layer, **given),
            captum.LayerGradCam(reference, getattr(reference, layer)).attribute(x, target)[:, 0],
        )
    guided = values(model, x, method="guided_backprop", **given)
    with pytest.warns(UserWarning, match="backward hooks"):
        wanted = captum.GuidedBackprop(reference).attribute(leaf, target)
    same(guided, wanted)
    with pytest.warns(UserWarning, match="backward hooks"):
        both = captum.GuidedGradCam(reference, reference.conv2).attribute(leaf, target)
    same(values(model, x, method="guided_grad_cam", select="conv2", **given), both)
    for baseline in (0.0, 0.7):
        same(
            values(
                model, x, method="occlusion", window=[3, 2], stride=2, baseline=baseline, **given
            ),
            captum.Occlusion(run).attribute(
                x, (2, 3, 2), (2, 2, 2), target=target, baselines=baseline
            )[:, 0],
        )
    ours = values(model, x, method="integrated_gradients", points=50, **given)
    theirs = captum.IntegratedGradients(run).attribute(x, target=target, n_steps=50)
    assert (ours - theirs).abs().max() < (1e-8 if dtype is torch.float64 else 1e-6)


class Residual(nn.Module):
    """A basic block of a residual net (He et al. 2015), in place wherever torchvision's is."""

    def __init__(self, given: int, size: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, size, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(size)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(size, size, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(size)
        self.downsample = None
        if stride > 1 or given != size:
            conv = nn.Conv2d(given, size, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(size))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def written_resnet(width: int = 16) -> nn.Sequential:
    """The architecture of resnet18, with fewer channels."""
    sizes = [width, width, 2 * width, 4 * width, 8 * width]
    stem = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    layers = [
        nn.Sequential(Residual(a, b, 1 if i == 0 else 2), Residual(b, b, 1))
        for i, (a, b) in enumerate(pairwise(sizes))
    ]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10)]
    return nn.Sequential(*stem, *layers, *end)


def of_torchvision() -> nn.Module:
    declare_missing()
    models: Any = pytest.importorskip("torchvision.models")
    return models.resnet18(num_classes=10)


def of_timm() -> nn.Module:
    declare_missing()
    timm: Any = pytest.importorskip("timm")
    return timm.create_model("resnet18", num_classes=10, zero_init_last=False)


RESNETS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "written out": (written_resnet, ("7.1.bn2", "5.0.conv1", "7")),
    "torchvision": (of_torchvision, ("layer4.1.bn2", "layer2.0.conv1", "layer4")),
    "timm": (of_timm, ("layer4.1.bn2", "layer2.0.conv1", "layer4")),
}
"""Forms of resnet18, with layers that are followed by operations in place."""


@pytest.mark.filterwarnings("ignore:Setting backward hooks:UserWarning")
@pytest.mark.parametrize("form", RESNETS)
@DTYPES
def test_pictures_of_resnet18_equal_captum(form: str, dtype: torch.dtype) -> None:
    captum = pytest.importorskip("captum.attr")
    torch.manual_seed(1)  # with which no picture is zero everywhere
    make, layers = RESNETS[form]
    model = make().to(dtype).eval()
    x = torch.randn(2, 3, 64, 64, dtype=dtype)
    leaf = x.clone().requires_grad_()
    given: dict[str, Any] = {"target": 5}
    same(values(model, x, method="saliency", **given), captum.Saliency(model).attribute(leaf, 5))
    for layer in layers:
        wanted = captum.LayerGradCam(model, model.get_submodule(layer)).attribute(x, 5)[:, 0]
        same(values(model, x, method="grad_cam", select=layer, **given), wanted.detach())
        both = captum.GuidedGradCam(model, model.get_submodule(layer)).attribute(leaf, 5)
        same(values(model, x, method="guided_grad_cam", select=layer, **given), both.detach())
    wanted = captum.GuidedBackprop(model).attribute(leaf, 5)
    same(values(model, x, method="guided_backprop", **given), wanted.detach())
    covered = captum.Occlusion(model).attribute(x, (3, 32, 32), (3, 32, 32), target=5)[:, 0]
    same(values(model, x, method="occlusion", window=[32, 32], stride=32, **given), covered)
    ours = values(model, x, method="integrated_gradients", points=10, **given)
    theirs = captum.IntegratedGradients(model).attribute(x, target=5, n_steps=10)
    assert (ours - theirs).abs().max() < (1e-8 if dtype is torch.float64 else 1e-6)


# -- formulas ----------------------------------------------------------------------------------


def gradient(model: nn.Module, x: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(score(model(leaf)).sum(), leaf)
    return found


@FORMS
def test_integrated_gradients_equal_the_sum_over_the_line(form: str) -> None:
    model, x = net(form), torch.randn(3, 2, 7, 6, dtype=torch.float64)
    nodes, weights = np.polynomial.legendre.leggauss(20)
    total = torch.zeros_like(x)
    for node, weight in zip(nodes, weights, strict=True):
        at = 0.5 + (node + 1) / 2 * (x - 0.5)
        total += weight / 2 * gradient(model, at, lambda out: out[:, 2])
    spec: dict[str, Any] = {
        "method": "integrated_gradients",
        "points": 20,
        "baseline": 0.5,
        "target": 2,
    }
    found = picture(model, x, **spec)
    same(found.maps[0].values, total * (x - 0.5), 1e-10)
    ends = model(x)[:, 2] - model(torch.full_like(x, 0.5))[:, 2]
    gap = found.maps[0].values.flatten(1).sum(1) - ends
    assert found.facts["gap"] == pytest.approx(gap.tolist(), abs=1e-12)


def test_more_points_close_the_completeness_gap() -> None:
    model, x = net(), torch.randn(3, 2, 7, 6, dtype=torch.float64)
    spec: dict[str, Any] = {"method": "integrated_gradients", "target": 0}
    few, many = (picture(model, x, points=n, **spec).facts["gap"] for n in (2, 200))
    assert np.abs(many).max() < 0.2 * np.abs(few).max()


def test_guided_backprop_equals_relus_written_out_for_every_form() -> None:
    class Guided(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clamp(min=0)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            (x,) = ctx.saved_tensors
            return gradients[0] * (x > 0) * (gradients[0] > 0)

    reference, x = net("module"), torch.randn(3, 2, 7, 6, dtype=torch.float64)

    def written_out(x: Tensor) -> Tensor:
        apply: Callable[[Tensor], Tensor] = Guided.apply
        x = apply(reference.conv2(apply(reference.bn(reference.conv1(x)))))
        return reference.head(x.flatten(2).mean(2))

    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(written_out(leaf)[:, 1].sum(), leaf)
    for form in ("module", "function", "in place"):
        same(values(net(form), x, method="guided_backprop", target=1), wanted, 1e-12)


def test_relu_is_guided_where_it_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 2, 7, 6, dtype=torch.float64)
    wanted = values(net("function"), x, method="guided_backprop", target=1)
    original = F.relu
    monkeypatch.setattr(F, "relu", lambda *args, **options: original(*args, **options))
    assert torch.equal(values(net("function"), x, method="guided_backprop", target=1), wanted)


@pytest.mark.parametrize("target", ["label", "top", "loss", 2])
def test_the_target_is_what_the_picture_explains(target: str | int) -> None:
    model, x, labels = net(), torch.randn(4, 2, 7, 6, dtype=torch.float64), [2, 0, 1, 1]
    rows = torch.arange(4)
    scores: dict[str | int, Callable[[Tensor], Tensor]] = {
        "label": lambda out: out[rows, labels],
        "top": lambda out: out.max(1).values,
        "loss": lambda out: F.cross_entropy(out, torch.tensor(labels), reduction="none"),
        2: lambda out: out[:, 2],
    }
    found = picture(model, x, labels, method="saliency", target=target)
    same(found.maps[0].values, gradient(model, x, scores[target]).abs(), 1e-12)
    top = model(x).argmax(1).tolist()
    facts = {"label": labels, "top": top, "loss": "loss", 2: [2] * 4}
    assert found.facts["target"] == facts[target]


@pytest.mark.parametrize("baseline", [0.0, "mean"])
def test_windows_cover_all_channels_also_where_they_come_last(baseline: float | str) -> None:
    torch.manual_seed(0)

    class ChannelsLast(nn.Module):
        """Receives [samples, height, width, 3]."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.conv(x.movedim(-1, 1)), inplace=True).mean((2, 3)))

    class ChannelsFirst(ChannelsLast):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.movedim(1, -1))

    model, x = ChannelsLast().double().eval(), torch.randn(2, 6, 7, 3, dtype=torch.float64)
    twin = ChannelsFirst().double().eval()
    twin.load_state_dict(model.state_dict())
    given: dict[str, Any] = {"method": "occlusion", "window": [3, 2], "stride": 2, "target": 1}
    found = values(model, x, baseline=baseline, **given)
    assert found.shape == (2, 6, 7)
    same(found, values(twin, x.movedim(-1, 1), baseline=baseline, **given))
    with torch.no_grad():
        covered = x.clone()
        covered[:, :3, :2] = 0.0 if baseline == 0.0 else x.mean((1, 2), keepdim=True)
        corner = (model(x) - model(covered))[:, 1]
    same(found[:, 0, 0], corner)


def test_tokens_are_explained_at_their_embedding() -> None:
    torch.manual_seed(0)

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens).tanh().mean(1))

    model, tokens = Tokens().double(), torch.randint(7, (3, 5))
    leaf = model.embed(tokens).detach().requires_grad_()
    model.head(leaf.tanh().mean(1))[:, 1].sum().backward()
    assert leaf.grad is not None
    found = picture(model, tokens, method="input_x_gradient", target=1)
    assert (found.maps[0].node, found.maps[0].role) == ("embed", "output")
    same(found.maps[0].values, leaf.detach() * leaf.grad, 1e-12)


def test_several_layers_have_one_map_each_also_if_nothing_in_the_model_is_trainable() -> None:
    model, x = net(), torch.randn(2, 2, 7, 6, dtype=torch.float64)
    select = {"class": "Conv2d"}
    wanted = picture(model, x, method="grad_cam", select=select, target=0)
    model.requires_grad_(False)
    found = picture(model, x, method="grad_cam", select=select, target=0)
    assert [m.node for m in found.maps] == ["conv1", "conv2"]
    for ours, other in zip(found.maps, wanted.maps, strict=True):
        same(ours.values, other.values, 1e-12)


class Smooth(nn.Module):
    """Has no ReLU, and returns one number per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any], str]] = {
    "no ReLU": (Smooth, (2, 4), {"method": "guided_backprop"}, "defined for ReLU"),
    "no places": (
        Smooth,
        (2, 4),
        {"method": "grad_cam", "select": "layer"},
        r"layer returns \[2, 1\], which has no positions",
    ),
    "no layer": (Smooth, (2, 4), {"method": "grad_cam", "select": "conv*"}, "matches no module"),
    "no class": (
        lambda: nn.Linear(4, 3),
        (2, 4),
        {"method": "saliency", "target": 3},
        "class 3 does not exist; the model has 3 classes",
    ),
    "no labels": (
        lambda: nn.Linear(4, 3),
        (2, 4),
        {"method": "saliency", "target": "label"},
        "classes of the samples are unknown",
    ),
    "no classes": (nn.Identity, (2, 4, 3), {"method": "saliency"}, r"returns \[2, 4, 3\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_picture_that_would_be_wrong_is_refused(case: str) -> None:
    make, shape, spec, why = REFUSED[case]
    with pytest.raises(ProbeError, match=why):
        picture(make(), torch.randn(shape), **spec)


def test_a_model_with_one_output_per_sample_needs_no_class() -> None:
    model, x = Smooth().double(), torch.randn(3, 4, dtype=torch.float64)
    found = picture(model, x, method="saliency", target="label")
    same(found.maps[0].values, gradient(model, x, lambda out: out[:, 0]).abs(), 1e-12)
    assert "target" not in found.facts


@pytest.mark.parametrize("picture", ["saliency", "input_x_gradient", "grad_cam"])
def test_gradients_that_would_end_in_a_quantized_layer_are_refused(picture: str) -> None:
    class Residual(nn.Module):
        """The gradient passes by the quantized layer, without its part."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.layer = nn.Conv1d(2, 4, 1), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x).movedim(1, 2)
            return (x + self.layer(x)).mean(1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch recommends another package
        model = torch.ao.quantization.quantize_dynamic(
            Residual().eval(), {nn.Linear}, dtype=torch.qint8
        )
    select = {"select": "conv"} if picture == "grad_cam" else {}
    run = comgra.look(
        model, torch.randn(2, 2, 5), pictures={"why": {"method": picture, "target": 1, **select}}
    )
    with pytest.raises(comgra.ComgraError, match="gradients end in layer, a quantized layer"):
        run.picture("why", 0)
