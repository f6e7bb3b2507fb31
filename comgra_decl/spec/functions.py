"""Parts of an entry of `nodes` for functions, for parts of tensors and for fused attention."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from comgra_decl.spec.base import Bool, Int, SpecModel

FUNCTION_CAPTURES = ("output", "output_grad", "input", "input_grad")
"""What can be captured of a function call."""

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_SHORT = {"F": "torch.nn.functional", "nn": "torch.nn", "Tensor": "torch.Tensor"}


def _checked_function(name: str) -> str:
    """Return the full name; whether the function exists is only known when the model runs."""
    if not _DOTTED.fullmatch(name):
        raise ValueError(
            f"{name!r} is not the dotted name of a function, such as 'torch.softmax', 'F.relu' or "
            "'my_package.layers.my_function'"
        )
    first, _, rest = name.partition(".")
    return f"{_SHORT[first]}.{rest}" if first in _SHORT else name


def _checked_label(name: str) -> str:
    if not name.strip() or name != name.strip():
        raise ValueError(f"{name!r} must not be empty, or start or end with a space")
    return name


FunctionName = Annotated[str, AfterValidator(_checked_function)]


class SplitSpec(SpecModel):
    """Splits each captured tensor along one dimension: heads, tokens, experts.

    The parts become further roles of the node, such as "output.head 0" in addition to "output";
    gradients are split as well. A tensor can have at most 64 parts. A tensor that cannot be split
    is recorded only as a whole, and the reason is reported.
    """

    dim: Int
    """The dimension to split, counted in the full tensor with its batch dimension; -1 is the
    last."""

    name: Annotated[str, AfterValidator(_checked_label)] = "part"
    """The name of a part: head, token, expert."""

    groups: Annotated[Int, Field(ge=1)] | None = None
    """Number of equal groups of neighbouring indices; null makes every index its own part."""


class AttentionSpec(SpecModel):
    """Records the weights of fused attention, which the fused call does not return."""

    recompute: Bool = True
    """Whether to recompute the attention weights of the recorded samples from query, key, mask and
    scale, without dropout, and to store their values under the role "attention (recomputed)":
    float32 [samples, heads, queries, keys]. Their size is limited by `values.max_elements`."""
