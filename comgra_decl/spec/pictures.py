"""Pictures of a probe's samples, and the methods that make them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from comgra_decl.errors import did_you_mean
from comgra_decl.spec.base import Int, Number, SpecModel
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

    position: Int = -1
    """If the model returns [samples, positions, tokens], the position whose output is explained."""

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


class GradCamSpec(AttributionSpec):
    """Grad-CAM (Selvaraju et al. 2017): where the channels of a convolution support the target.

    The values are signed; the usual picture shows the positive ones.
    """

    method: Literal["grad_cam"]
    """Selects the method."""

    select: Selectors = Field(min_length=1)
    """The layers, such as `{class: Conv2d}`."""


class GuidedGradCamSpec(AttributionSpec):
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

    position: Int = -1
    """The position whose attention is shown."""

    residual: Annotated[Number, Field(ge=0, le=1)] = 0.5
    """The share of the residual connection in each layer; the paper has 0.5."""


class LogitLensSpec(SpecModel):
    """What a language model would predict after each layer (nostalgebraist 2020).

    The output of each layer goes through the model's last norm and its head, as if the layers after
    it did nothing. The picture of a layer contains the log-probability of the explained token at
    each position, and the tokens with the highest one.
    """

    of: Annotated[str, Field(min_length=1)]
    """The probe."""

    method: Literal["logit_lens"]
    """Selects the method."""

    select: Selectors = Field(min_length=1)
    """The layers, such as `transformer.h.*`."""

    norm: Annotated[str, Field(min_length=1)] | None = None
    """The path of the last norm, such as transformer.ln_f; null for the norm whose output the head
    receives."""

    head: Annotated[str, Field(min_length=1)] | None = None
    """The path of the head, such as lm_head; null for the linear layer that is called last."""

    target: Literal["top"] | Annotated[Int, Field(ge=0)] = "top"
    """The explained token. `top`: at each position, the one that the model predicts. A number: this
    token."""


_KINDS: dict[str, type[AttributionSpec | AttentionRolloutSpec | LogitLensSpec]] = {
    "grad_cam": GradCamSpec,
    "guided_grad_cam": GuidedGradCamSpec,
    "saliency": SaliencySpec,
    "input_x_gradient": InputXGradientSpec,
    "guided_backprop": GuidedBackpropSpec,
    "integrated_gradients": IntegratedGradientsSpec,
    "occlusion": OcclusionSpec,
    "attention_rollout": AttentionRolloutSpec,
    "logit_lens": LogitLensSpec,
}

METHODS = tuple(_KINDS)
"""The methods that make a picture for a probe."""


def _kind(value: Any) -> str | None:
    if isinstance(value, (AttributionSpec, AttentionRolloutSpec, LogitLensSpec)):
        return type(value).__name__
    method = value.get("method") if isinstance(value, Mapping) else None
    known = _KINDS.get(method) if isinstance(method, str) else None
    return None if known is None else known.__name__


def _with_known_method(value: Any) -> Any:
    if isinstance(value, Mapping) and _kind(value) is None:
        method = value.get("method")
        raise ValueError(
            f"method {method!r} is not one of {', '.join(METHODS)}{did_you_mean(method, METHODS)}"
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
    | Annotated[AttentionRolloutSpec, Tag("AttentionRolloutSpec")]
    | Annotated[LogitLensSpec, Tag("LogitLensSpec")],
    Discriminator(_kind),
    BeforeValidator(_with_known_method),
]
"""One entry of `pictures`."""
