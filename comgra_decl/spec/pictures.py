"""Pictures of a probe's samples, and the methods that make them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from comgra_decl.errors import did_you_mean
from comgra_decl.spec.base import Bool, Int, Number, SpecModel
from comgra_decl.spec.interventions import Measure
from comgra_decl.spec.keep import checked_target
from comgra_decl.spec.nodes import Selectors

Token = Annotated[Int, Field(ge=0)]


class TokenTarget(SpecModel):
    """The output for a token, or for a token rather than another one."""

    token: Literal["top", "next"] | Token | list[Token] = "top"
    """The token. `top`: the one with the highest output at this step, which the model would
    generate. `next`: the one that follows in the input. A number, or a list with one for each
    sample."""

    rather_than: Token | list[Token] | None = None
    """Another token, whose output is subtracted: a number, or a list with one for each sample."""

    position: Literal["all"] | Int | list[Int] = -1
    """If the model returns [samples, positions, tokens], the position whose output is explained. A
    list, or `all`: each of these positions; the picture has one axis more. `all` omits the last
    one if `token` is `next`."""

    score: Literal["logit", "log_probability"] = "logit"
    """What the output is: the logit, or the logarithm of the probability."""


def _which_target(value: Any) -> str | None:
    if isinstance(value, (Mapping, TokenTarget)):
        return "TokenTarget"
    return "name" if isinstance(value, str) else "class"


Target = Annotated[
    Annotated[Literal["label", "top", "loss"], Tag("name")]
    | Annotated[Token, Tag("class")]
    | Annotated[TokenTarget, Tag("TokenTarget")],
    Discriminator(_which_target),
]
"""What a picture explains."""


class AttributionSpec(SpecModel):
    """The keys of the pictures that explain an output of the model for each sample."""

    of: Annotated[str, Field(min_length=1)]
    """The probe."""

    target: Target = "top"
    """What the picture explains. `label`: the output for the sample's class. `top`: the output for
    the class with the highest output at this step. `loss`: the cross-entropy between the outputs
    and the sample's class. A number: the output for that class. If the model returns a single
    number per sample, the picture explains that number, whatever the target. `{token: 5,
    rather_than: 7, position: -1}`: the output of a language model for a token, at a position."""


class _SelectingSpec(SpecModel):
    """The keys of the pictures of selected modules."""

    optional: Bool = False
    """Whether the picture is left out if `select` matches no module. Otherwise, a pattern that
    matches nothing ends the program before its first forward pass."""


class GradCamSpec(_SelectingSpec, AttributionSpec):
    """Grad-CAM (Selvaraju et al. 2017): where the channels of a convolution support the target.

    The values are signed; the usual picture shows the positive ones.
    """

    method: Literal["grad_cam"]
    """Selects the method."""

    select: Selectors = Field(min_length=1)
    """The layers, such as `{class: Conv2d}`."""


class GuidedGradCamSpec(_SelectingSpec, AttributionSpec):
    """Guided backpropagation times the positive part of Grad-CAM, enlarged to the input's size."""

    method: Literal["guided_grad_cam"]
    """Selects the method."""

    select: Selectors = Field(min_length=1)
    """The layer of the Grad-CAM; if several match, the last one that is called."""


class SaliencySpec(AttributionSpec):
    """The magnitude of the target's gradient with respect to the input (Simonyan et al. 2014)."""

    method: Literal["saliency"]
    """Selects the method."""


class InputXGradientSpec(AttributionSpec):
    """The input times the target's gradient (Shrikumar et al. 2016)."""

    method: Literal["input_x_gradient"]
    """Selects the method."""


class GuidedBackpropSpec(AttributionSpec):
    """The gradient, with each ReLU passing on only positive gradients (Springenberg et al. 2015).

    A network without ReLU is rejected, because its picture would be the plain gradient.
    """

    method: Literal["guided_backprop"]
    """Selects the method."""


class IntegratedGradientsSpec(AttributionSpec):
    """Gradients along the straight line from a baseline to the input (Sundararajan et al. 2017).

    The record also contains the completeness gap of each sample: the sum of the picture minus the
    difference in the target between the input and the baseline. If the gap is large, use more
    points.
    """

    method: Literal["integrated_gradients"]
    """Selects the method."""

    points: Annotated[Int, Field(ge=1, le=10_000)] = 50
    """Number of points on the line (Gauss-Legendre quadrature)."""

    baseline: Number = 0.0
    """The value of every element of the baseline."""


class TokenBaseline(SpecModel):
    """The embedding of a token."""

    token: Token
    """The token, such as that of padding or a mask."""


class OcclusionSpec(AttributionSpec):
    """How much the target drops when a window of the input is covered (Zeiler and Fergus 2014)."""

    method: Literal["occlusion"]
    """Selects the method."""

    window: Annotated[list[Annotated[Int, Field(ge=1)]], Field(min_length=1)]
    """Size of the window in the last dimensions of the input, such as [8, 8]. It covers all
    channels. If the input is tokens, it has one dimension, the positions."""

    stride: Annotated[Int, Field(ge=1)] = 1
    """Distance between neighbouring windows."""

    baseline: Number | Literal["mean"] | TokenBaseline = 0.0
    """The value that fills the window; `mean`: the mean of each sample and channel. If the input is
    tokens, it fills their embeddings; `{token: 0}` is the embedding of a token."""

    @model_validator(mode="after")
    def _covers_everything(self) -> OcclusionSpec:
        if self.stride > min(self.window):
            raise ValueError(
                f"a stride of {self.stride} leaves parts of the input uncovered; it must not "
                f"exceed the window, {self.window}"
            )
        return self


def _checked_file(name: str) -> str:
    if not name.endswith((".npz", ".safetensors")):
        raise ValueError(f"must be the path of a .npz or .safetensors file, got {name!r}")
    return name


class CaptumMethod(SpecModel):
    """A class of Captum; other keys are arguments of its constructor or of its `attribute`."""

    model_config = ConfigDict(extra="allow")

    target: Annotated[str, AfterValidator(checked_target)] = Field(alias="_target_")
    """The class, such as captum.attr.DeepLift, or another one with the same methods."""

    def __str__(self) -> str:
        """Return the name of the class."""
        return self.target


class CaptumSpec(_SelectingSpec, AttributionSpec):
    """Attributions by a class of Captum, which is made from the model, or from it and a layer.

    Lists become tuples, except for `baselines`, `feature_mask` and `layer_mask`, which become
    tensors. `baselines` may also be `zeros`, `ones` or `mean` (of the samples). A class that is
    made from another method, such as NoiseTunnel, has it as `attribution_method: {_target_: ...}`.
    If `return_convergence_delta` is true, the record contains the gaps.
    """

    method: CaptumMethod
    """The class, as in {_target_: captum.attr.IntegratedGradients, n_steps: 20}."""

    select: Selectors = []
    """The layers, for classes that take one, such as captum.attr.LayerConductance."""


class AttentionRolloutSpec(SpecModel):
    """How much attention a position pays to each position of the input through all layers.

    The attention weights of each layer, as means over heads, are mixed with the residual connection
    and multiplied from the first layer to the last (Abnar and Zuidema 2020, "Quantifying attention
    flow in transformers").
    """

    of: Annotated[str, Field(min_length=1)]
    """The probe."""

    method: Literal["attention_rollout"]
    """Selects the method."""

    position: Literal["all"] | Int | list[Int] = -1
    """The position whose attention is shown. A list, or `all`: each of these positions; the
    picture has one axis more."""

    residual: Annotated[Number, Field(ge=0, le=1)] = 0.5
    """The share of the residual connection in each layer; the paper has 0.5."""


class LogitLensSpec(_SelectingSpec):
    """What a language model would predict after each layer (nostalgebraist 2020).

    The output of each layer goes through the model's last norm and its head, as if the layers after
    it did nothing. The picture of a layer contains, at each position, the log-probability and the
    rank of the explained token, and the token with the highest output.
    """

    of: Annotated[str, Field(min_length=1)]
    """The probe."""

    method: Literal["logit_lens"]
    """Selects the method."""

    select: Selectors = []
    """The layers, such as `transformer.h.*`. If there are none: the members of the `nn.ModuleList`
    or `nn.Sequential` that consists of modules of one class and has the most parameters."""

    norm: Annotated[str, Field(min_length=1)] | None = None
    """The path of the last norm, such as transformer.ln_f; null for the norm whose output the head
    receives."""

    head: Annotated[str, Field(min_length=1)] | None = None
    """The path of the head, such as lm_head; null for the linear layer that is called last."""

    translators: Annotated[str, AfterValidator(_checked_file)] | None = None
    """A tuned lens (Belrose et al. 2023): a .npz or .safetensors file with PATH.weight [features,
    features] and, optionally, PATH.bias [features] for each layer. The layer's output is multiplied
    by the weight, as by a linear layer, before it goes through the norm."""

    target: Literal["top", "next"] | Annotated[Int, Field(ge=0)] = "top"
    """The explained token. `top`: at each position, the one that the model predicts. `next`: the
    one that follows in the input; the last position has none. A number: this token."""


class _LandscapeSpec(_SelectingSpec):
    """The keys of the pictures that show a loss as a function of the parameters."""

    of: Annotated[str, Field(min_length=1)]
    """The probe."""

    select: Selectors = []
    """The modules whose own parameters are meant, such as `{class: Linear}`; by default all."""

    measure: Measure = "loss"
    """The number that is averaged over the samples, as in `interventions`. `loss`: the
    cross-entropy with the sample's class or, if a model returns [samples, positions, classes], with
    the next token. `{_target_: ...}`: a function of the model's output, which returns one number
    per sample."""

    position: Int = -1
    """If a model returns [samples, positions, classes], the position that is measured, except by
    `loss`."""


class HessianSpec(_LandscapeSpec):
    """The curvature of the loss: eigenvalues and the spectral density of its Hessian.

    The Hessian is that of the mean loss of the probe's samples with respect to all parameters that
    require a gradient. The Lanczos algorithm with full reorthogonalization finds both ends of its
    spectrum; stochastic Lanczos quadrature estimates the density (Ghorbani et al. 2019).
    """

    method: Literal["hessian"]
    """Selects the method."""

    top: Annotated[Int, Field(ge=1)] = 1
    """How many of the largest eigenvalues to store."""

    lowest: Annotated[Int, Field(ge=0)] = 1
    """How many of the smallest eigenvalues to store."""

    points: Annotated[Int, Field(ge=2, le=1000)] = 40
    """Number of steps of the algorithm, each of which takes a backward pass. If the residuals of
    the eigenvalues are large, use more."""

    vectors: Annotated[Int, Field(ge=1, le=1000)] = 1
    """Number of random vectors from which the algorithm starts. The density and the trace are means
    over them; the eigenvalues come from the first. They are the same at every step."""

    @model_validator(mode="after")
    def _finds_as_many(self) -> HessianSpec:
        if self.top + self.lowest > self.points:
            raise ValueError(
                f"{self.points} points find at most {self.points} eigenvalues, but top + lowest is "
                f"{self.top + self.lowest}; use more points"
            )
        return self


class TowardsFile(SpecModel):
    """A direction towards other parameters of the same model."""

    to: Annotated[str, AfterValidator(_checked_file)]
    """A .npz or .safetensors file of parameters by name, such as `numpy.savez(FILE,
    **run.checkpoint(400))` writes. Its parameters are at coordinate 1, those of the step at 0."""


class LossSliceSpec(_LandscapeSpec):
    """The loss on a line or a grid through the parameters of the step (Li et al. 2018)."""

    method: Literal["loss_slice"]
    """Selects the method."""

    directions: Annotated[
        list[Literal["random"] | TowardsFile], Field(min_length=1, max_length=2)
    ] = ["random"]
    """One direction for a line, two for a grid. `random`: a random one, the same at every step, in
    which each filter is as long as that of the parameters at this step; parameters with one
    dimension, such as biases, stay as they are. `{to: FILE}`: towards other parameters."""

    plane: Annotated[str, AfterValidator(_checked_file)] | None = None
    """A file that `run.plane().save(FILE)` has written, in the place of `directions`: both
    directions are those in which the parameters of the checkpoints moved most, and the picture
    contains their way."""

    points: Annotated[Int, Field(ge=3, le=201)] = 21
    """Number of points along each direction; it must be odd, so that one of them is the step's
    own. Each takes a forward pass: a grid of 21 points takes 441."""

    reach: Annotated[Number, Field(gt=0)] = 1.0
    """The coordinate of the last point; the first one is at its negative."""

    @model_validator(mode="after")
    def _has_a_centre(self) -> LossSliceSpec:
        if self.plane is not None and (self.directions != ["random"] or self.select):
            raise ValueError(
                "plane: determines the directions and moves all parameters; omit `directions` and "
                "`select`"
            )
        if self.points % 2 == 0:
            raise ValueError(
                f"points: must be odd, so that one point is the step's own, got {self.points}"
            )
        return self


class MaximiseSpec(_SelectingSpec):
    """Inputs to which single units respond strongly (Erhan et al. 2009), by gradient ascent.

    The value of a unit is the mean of its output over all positions. The ascent begins with the
    mean of the probe's samples and some noise. Each step moves the input by `step_size` along the
    gradient, divided by its root mean square, and then draws it towards that mean by `decay`. Sizes
    are in units of the standard deviation of the samples.
    """

    of: Annotated[str, Field(min_length=1)]
    """The probe, whose samples determine the shape and the scale of the input."""

    method: Literal["maximise"]
    """Selects the method."""

    select: Selectors = Field(min_length=1)
    """The layers, such as conv2."""

    units: Annotated[list[Token], Field(min_length=1)] | None = None
    """The units, such as channels, by number; null for the first eight."""

    points: Annotated[Int, Field(ge=1, le=10_000)] = 64
    """Number of steps, each of which takes a forward and a backward pass for as many units as the
    probe has samples."""

    step_size: Annotated[Number, Field(gt=0)] = 0.1
    """How far a step moves the input, as a root mean square."""

    decay: Annotated[Number, Field(ge=0, lt=1)] = 0.01
    """The share of the distance to the mean that each step takes back, which keeps parts of the
    input that do not matter to the unit near the mean."""

    noise: Annotated[Number, Field(ge=0)] = 0.1
    """The standard deviation of the noise at the beginning, the same for all units and steps."""


_Any = AttributionSpec | MaximiseSpec | AttentionRolloutSpec | LogitLensSpec | _LandscapeSpec

_KINDS: dict[str, type[_Any]] = {
    "grad_cam": GradCamSpec,
    "guided_grad_cam": GuidedGradCamSpec,
    "saliency": SaliencySpec,
    "input_x_gradient": InputXGradientSpec,
    "guided_backprop": GuidedBackpropSpec,
    "integrated_gradients": IntegratedGradientsSpec,
    "occlusion": OcclusionSpec,
    "maximise": MaximiseSpec,
    "attention_rollout": AttentionRolloutSpec,
    "logit_lens": LogitLensSpec,
    "hessian": HessianSpec,
    "loss_slice": LossSliceSpec,
}

METHODS = tuple(_KINDS)
"""The methods that make a picture for a probe."""


def _kind(value: Any) -> str | None:
    if isinstance(value, _Any):
        return type(value).__name__
    method = value.get("method") if isinstance(value, Mapping) else None
    if isinstance(method, (CaptumMethod, Mapping)):
        return "CaptumSpec"
    known = _KINDS.get(method) if isinstance(method, str) else None
    return None if known is None else known.__name__


def _with_known_method(value: Any) -> Any:
    if isinstance(value, Mapping) and _kind(value) is None:
        method = value.get("method")
        if method is None:
            raise ValueError(
                "needs a `method`; if an existing picture is meant, its name is spelled differently"
            )
        raise ValueError(
            f"method {method!r} is not one of {', '.join(METHODS)} or {{_target_: captum.attr...}}"
            f"{did_you_mean(method, METHODS)}"
        )
    return value


PictureSpec = Annotated[
    Annotated[GradCamSpec, Tag("GradCamSpec")]
    | Annotated[GuidedGradCamSpec, Tag("GuidedGradCamSpec")]
    | Annotated[SaliencySpec, Tag("SaliencySpec")]
    | Annotated[InputXGradientSpec, Tag("InputXGradientSpec")]
    | Annotated[GuidedBackpropSpec, Tag("GuidedBackpropSpec")]
    | Annotated[IntegratedGradientsSpec, Tag("IntegratedGradientsSpec")]
    | Annotated[OcclusionSpec, Tag("OcclusionSpec")]
    | Annotated[MaximiseSpec, Tag("MaximiseSpec")]
    | Annotated[AttentionRolloutSpec, Tag("AttentionRolloutSpec")]
    | Annotated[CaptumSpec, Tag("CaptumSpec")]
    | Annotated[LogitLensSpec, Tag("LogitLensSpec")]
    | Annotated[HessianSpec, Tag("HessianSpec")]
    | Annotated[LossSliceSpec, Tag("LossSliceSpec")],
    Discriminator(_kind),
    BeforeValidator(_with_known_method),
]
"""One entry of `pictures`."""
