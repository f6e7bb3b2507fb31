"""Pictures of a probe's samples: which parts of the input or of a layer support the output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import ceil
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from comgra_decl.errors import ProbeError
from comgra_decl.hooks.modes import CallWatch
from comgra_decl.hooks.probing.lens import Lens, equal_layers
from comgra_decl.hooks.probing.samples import widened
from comgra_decl.hooks.probing.subject import Drawn, Map, Point, Subject, Tap
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.records import LENS_RANKS, LENS_TOKENS
from comgra_decl.spec.axes import name_axes
from comgra_decl.spec.pictures import (
    AttentionRolloutSpec,
    AttributionSpec,
    CaptumSpec,
    GradCamSpec,
    GuidedBackpropSpec,
    GuidedGradCamSpec,
    HessianSpec,
    InputXGradientSpec,
    IntegratedGradientsSpec,
    LogitLensSpec,
    LossSliceSpec,
    MaximiseSpec,
    OcclusionSpec,
    PictureSpec,
    SaliencySpec,
    TokenBaseline,
    TokenTarget,
)

_UNREACHED = "the model's outputs have no gradient"


def drawn(spec: PictureSpec, subject: Subject) -> Drawn:
    """Return the picture that a spec declares.

    Raises:
        ProbeError: the picture cannot be made for this model; the message states why.
    """
    if isinstance(spec, LogitLensSpec):
        return _logit_lens(spec, subject)
    if isinstance(spec, HessianSpec):
        from comgra_decl.hooks.probing.curvature import hessian

        return hessian(spec, subject)
    if isinstance(spec, MaximiseSpec):
        from comgra_decl.hooks.probing.maximising import maximised

        return maximised(spec, subject)
    if isinstance(spec, LossSliceSpec):
        from comgra_decl.hooks.probing.slices import loss_slice

        return loss_slice(spec, subject)
    if isinstance(spec, AttentionRolloutSpec):
        from comgra_decl.hooks.probing.language import attention_rollout

        return _rolled(spec, subject, attention_rollout(spec, subject))
    facts: dict[str, Any] = {"method": str(spec.method)}
    if isinstance(spec.target, TokenTarget):
        from comgra_decl.hooks.probing.language import TokenSubject, by_position

        if not isinstance(spec.target.position, int):
            found = by_position(spec.target, subject)
            alone = {at: spec.model_copy(update={"target": own}) for at, own in found}
            return _stacked({at: drawn(each, subject) for at, each in alone.items()})
        subject = TokenSubject(subject, spec.target)
    classes = subject.classes(spec.target)
    facts |= subject.facts
    if classes is not None:
        facts["target"] = "loss" if spec.target == "loss" else classes.tolist()
    if isinstance(spec, CaptumSpec):
        from comgra_decl.hooks.probing.captum_methods import captum_picture

        result = captum_picture(spec, subject, classes)
    else:
        result = _METHODS[type(spec)](spec, subject, classes)
    return Drawn(result.maps, {**facts, **result.facts})


def _rolled(spec: AttentionRolloutSpec, subject: Subject, values: torch.Tensor) -> Drawn:
    point = subject.point()
    facts: dict[str, Any] = {"method": spec.method}
    if isinstance(spec.position, int):
        facts["position"], values = spec.position, values[:, 0]
    else:
        size = values.shape[2]
        wanted = range(size) if spec.position == "all" else spec.position
        facts["positions"] = [position % size for position in wanted]
    return Drawn([Map(point.node, point.role, values)], facts)


def _stacked(found: Mapping[int, Drawn]) -> Drawn:
    """Return the pictures of several positions as one, [samples, positions, ...].

    Facts about samples become lists with one for each position.
    """
    each = [*found.values()]
    maps = [
        replace(same[0], values=torch.stack([one.values for one in same], 1))
        for same in zip(*(picture.maps for picture in each), strict=True)
    ]
    facts: dict[str, Any] = {}
    for key, value in each[0].facts.items():
        several = isinstance(value, list)
        same = [picture.facts[key] for picture in each]
        facts[key] = (
            [list(of_sample) for of_sample in zip(*same, strict=True)] if several else value
        )
    del facts["position"]
    return Drawn(maps, {**facts, "positions": [*found]})


def _gradient(
    subject: Subject,
    point: Point,
    classes: torch.Tensor | None,
    spec: AttributionSpec,
) -> torch.Tensor:
    """Return the gradient of the explained numbers with respect to the value at a point."""
    subject.check_gradients()
    leaf = point.value.detach().clone().requires_grad_()
    with torch.enable_grad():
        # a clone, because the model may change its input in place
        scores = subject.call(replace(point, value=leaf.clone()))
        explained = subject.explained(scores, classes, spec.target)
        if not explained.requires_grad:
            raise ProbeError(_UNREACHED)
        (gradient,) = torch.autograd.grad(explained.sum(), leaf, materialize_grads=True)
    return gradient


def _saliency(spec: SaliencySpec, subject: Subject, classes: torch.Tensor | None) -> Drawn:
    point = subject.point()
    return Drawn([Map(point.node, point.role, _gradient(subject, point, classes, spec).abs())])


def _input_x_gradient(
    spec: InputXGradientSpec, subject: Subject, classes: torch.Tensor | None
) -> Drawn:
    point = subject.point()
    values = point.value * _gradient(subject, point, classes, spec)
    return Drawn([Map(point.node, point.role, values)])


def _integrated_gradients(
    spec: IntegratedGradientsSpec, subject: Subject, classes: torch.Tensor | None
) -> Drawn:
    """Return the average gradient along the line from the baseline, times the difference.

    Uses Gauss-Legendre quadrature, as in Sundararajan, Taly and Yan (2017), with Captum's nodes.
    """
    point = subject.point()
    baseline = torch.full_like(point.value, spec.baseline)
    difference = point.value - baseline
    nodes, weights = np.polynomial.legendre.leggauss(spec.points)
    total = torch.zeros_like(point.value, dtype=torch.float64)
    for node, weight in zip((1 + nodes) / 2, weights / 2, strict=True):
        there = replace(point, value=baseline + float(node) * difference)
        total += float(weight) * _gradient(subject, there, classes, spec).double()
    values = (total * difference).to(point.value.dtype)
    with torch.no_grad():
        ends = subject.scores(), subject.call(replace(point, value=baseline))
    at_input, at_baseline = (subject.explained(e, classes, spec.target).double() for e in ends)
    change = at_input - at_baseline
    gap = values.double().flatten(1).sum(1) - change
    facts = {"gap": gap.tolist(), "difference": change.tolist()}
    return Drawn([Map(point.node, point.role, values)], facts)


def _guided_backprop(
    spec: GuidedBackpropSpec, subject: Subject, classes: torch.Tensor | None
) -> Drawn:
    point = subject.point()
    return Drawn([Map(point.node, point.role, _guided(spec, subject, point, classes))])


def _guided(
    spec: GuidedBackpropSpec | GuidedGradCamSpec,
    subject: Subject,
    point: Point,
    classes: torch.Tensor | None,
) -> torch.Tensor:
    with _GuidedRelus() as relus:
        gradient = _gradient(subject, point, classes, spec)
    if not relus.count:
        raise ProbeError(
            f"{spec.method} is defined for ReLU, which this model does not call; its picture would "
            "be the plain gradient. Use saliency or integrated_gradients"
        )
    return gradient


def _grad_cam(spec: GradCamSpec, subject: Subject, classes: torch.Tensor | None) -> Drawn:
    cams = _cams(spec, subject, classes)
    return Drawn([Map(path, "output", cam) for path, cam in cams.items()])


def _guided_grad_cam(
    spec: GuidedGradCamSpec, subject: Subject, classes: torch.Tensor | None
) -> Drawn:
    cams = _cams(spec, subject, classes)
    path, cam = [*cams.items()][-1]
    point = subject.point()
    guided = _guided(spec, subject, point, classes)
    size = guided.shape[2:]
    if len(size) != cam.dim() - 1:
        raise ProbeError(f"a map of {path} cannot be enlarged to an input of {list(guided.shape)}")
    enlarged = F.interpolate(cam.clamp(min=0)[:, None], size, mode="nearest")
    return Drawn([Map(point.node, point.role, guided * enlarged)], {"layer": path})


def _cams(
    spec: GradCamSpec | GuidedGradCamSpec, subject: Subject, classes: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return the Grad-CAM of each selected layer, [samples, ...], in the order of the calls.

    The channels of the layer's output, each weighted with the mean of its gradient, are added up
    (Selvaraju et al. 2017, equations 1 and 2, without the final ReLU).
    """
    paths = subject.selected(spec.select)
    subject.check_gradients()
    tap = Tap(frozenset(paths))
    with torch.enable_grad():
        explained = subject.explained(subject.call(tap=tap), classes, spec.target)
        if not explained.requires_grad:
            raise ProbeError(_UNREACHED)
        edges = [*tap.edges.values()]
        found = torch.autograd.grad(explained.sum(), edges, allow_unused=True) if edges else ()
    gradients = dict(zip(tap.edges, found, strict=True))
    cams = {}
    for path, output in tap.outputs.items():
        if output.dim() < 3:
            raise ProbeError(f"{path} returns {list(output.shape)}, which has no positions to map")
        gradient = gradients.get(path)
        if gradient is not None:
            channels = tap.channels[path]
            over = tuple(dim for dim in range(1, output.dim()) if dim != channels)
            weights = widened(gradient).mean(over, keepdim=True)
            cams[path] = (weights * widened(output)).sum(channels)
    if not cams:
        without = [path for path in paths if path not in tap.outputs]
        if without:
            raise ProbeError(f"{', '.join(without)} returns no tensor of floating-point numbers")
        raise ProbeError(f"no gradient reaches {', '.join(paths)}")
    return cams


def _logit_lens(spec: LogitLensSpec, subject: Subject) -> Drawn:
    with torch.no_grad():
        lens = Lens(
            subject,
            subject.selected(spec.select) if spec.select else equal_layers(subject),
            norm=spec.norm,
            head=spec.head,
            translators=spec.translators,
        )
        explained = _seen_token(spec, subject, lens.final)
        maps: list[Map] = []
        ranks: list[Map] = []
        for path, logits in lens.predictions():
            chosen = explained.to(logits.device).expand(logits.shape[:-1])
            missing = chosen < 0
            wide, place = widened(logits), chosen.clamp(min=0)[..., None]
            likely = wide.log_softmax(-1).gather(-1, place)[..., 0]
            before = (wide > wide.gather(-1, place)).sum(-1)
            maps.append(Map(path, "output", likely.masked_fill(missing, torch.nan)))
            maps.append(Map(path, f"output{LENS_TOKENS}", logits.argmax(-1)))
            ranks.append(
                Map(path, f"output{LENS_RANKS}", (before + 1).masked_fill(missing, 0).int())
            )
        maps += ranks
    facts = {"method": spec.method, "target": spec.target, "norm": lens.norm, "head": lens.head}
    if spec.translators is not None:
        facts["translators"] = spec.translators
    return Drawn(maps, facts)


def _seen_token(spec: LogitLensSpec, subject: Subject, final: torch.Tensor) -> torch.Tensor:
    """Return the token that a lens explains at each position, or one for all; -1 for none."""
    if spec.target == "top":
        return final.argmax(-1)
    if spec.target == "next":
        named = [*tensors_in(subject.samples.args), *tensors_in(subject.samples.kwargs)]
        named.sort(key=lambda each: "decoder" not in str(each[0]))  # predicts its own tokens
        fits = (t for _, t in named if t.dtype == torch.int64 and t.shape == final.shape[:-1])
        tokens = next(fits, None)
        if tokens is None or tokens.dim() != 2:
            raise ProbeError(
                "target: next needs an input of integers [samples, positions] and an output "
                f"[samples, positions, tokens]; the output of the head is {list(final.shape)}"
            )
        return torch.cat([tokens[:, 1:], tokens.new_full((len(tokens), 1), -1)], 1)
    if spec.target >= final.shape[-1]:
        raise ProbeError(f"token {spec.target} does not exist; the head returns {final.shape[-1]}")
    return torch.tensor(spec.target)


def _occlusion(spec: OcclusionSpec, subject: Subject, classes: torch.Tensor | None) -> Drawn:
    """Return the mean drop in the explained number over the windows that cover each element."""
    point = subject.point()
    value, dims = point.value, len(spec.window)
    if point.node is not None:
        from comgra_decl.hooks.probing.language import covered_tokens

        return Drawn([Map(point.node, point.role, covered_tokens(spec, subject, point, classes))])
    if isinstance(spec.baseline, TokenBaseline):
        raise ProbeError("baseline: {token: ...} needs tokens, but the input is numbers")
    if value.dim() < dims + 1:
        raise ProbeError(
            f"occlusion with a window of {spec.window} needs a floating-point input with at least "
            f"{dims} dimensions per sample"
        )
    ends = value.dim() - _has_channels_last(point, dims)
    size = value.shape[ends - dims : ends]
    if any(part > whole for part, whole in zip(spec.window, size, strict=True)):
        raise ProbeError(f"a window of {spec.window} does not fit: the input has {list(size)}")
    over = tuple(range(ends - dims, ends))
    cover = value.mean(over, keepdim=True) if spec.baseline == "mean" else spec.baseline
    with torch.no_grad():
        whole = subject.explained(subject.scores(), classes, spec.target)
        total = torch.zeros((len(value), *size), dtype=whole.dtype, device=value.device)
        times = torch.zeros(size, dtype=whole.dtype, device=value.device)
        for window in _windows(size, spec.window, spec.stride):
            covered = value.clone()
            covered[_at(window, value.dim() - ends)] = cover
            scores = subject.call(replace(point, value=covered))
            drop = whole - subject.explained(scores, classes, spec.target)
            total[_at(window)] += drop.reshape(-1, *[1] * dims)
            times[window] += 1
    return Drawn([Map(None, point.role, total / times)])


def _windows(size: Iterable[int], window: list[int], stride: int) -> Iterator[tuple[slice, ...]]:
    """Yield the positions of all windows; those at the end are cut off at the border."""
    starts = [
        range(0, (max(0, ceil((whole - part) / stride)) + 1) * stride, stride)
        for whole, part in zip(size, window, strict=True)
    ]
    for corner in product(*starts):
        yield tuple(slice(at, at + part) for at, part in zip(corner, window, strict=True))


def _at(window: tuple[slice, ...], behind: int = 0) -> Any:
    """Return the index of a window in the last dimensions, or in those before the last ones."""
    return (..., *window, *[slice(None)] * behind)


def _has_channels_last(point: Point, places: int) -> bool:
    """Return whether a sample has its channels behind this many dimensions of places."""
    names = name_axes(
        point.value.shape[1:], kind="input", node="input", role=point.role, module_class=""
    )
    return len(names) == places + 1 and names[-1] == "channel"


class _GuidedRelus(CallWatch):
    """Makes every ReLU pass on only positive gradients, as a module, as a function or in place.

    Attributes:
        count: how many calls to ReLU had a gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def handle(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the function, and guide the gradient of its result if it is a ReLU."""
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") in ("relu", "relu_") and result.requires_grad:
            self.count += 1
            result.register_hook(lambda gradient: gradient.clamp(min=0))
        return result


_METHODS: dict[type, Callable[[Any, Subject, torch.Tensor | None], Drawn]] = {
    GradCamSpec: _grad_cam,
    GuidedBackpropSpec: _guided_backprop,
    GuidedGradCamSpec: _guided_grad_cam,
    InputXGradientSpec: _input_x_gradient,
    IntegratedGradientsSpec: _integrated_gradients,
    OcclusionSpec: _occlusion,
    SaliencySpec: _saliency,
}
