"""Parts of an entry of `nodes` for functions, for parts of tensors and for fused attention."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from comgra_decl.spec.base import Bool, Int, SpecModel

FUNCTION_CAPTURES = ("output", "output_grad", "input", "input_grad")
"""What can be captured from a function call."""

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_SHORT = {"F": "torch.nn.functional", "nn": "torch.nn", "Tensor": "torch.Tensor"}


def _checked_function(name: str) -> str:
    """Return the full name. Whether the function exists is checked only when the model runs."""
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

    Each part is recorded under an additional role of the node, such as "output.head 0" next to
    "output". Gradients are split as well. A tensor can have at most 64 parts. If a tensor cannot be
    split, it is recorded only as a whole, and the reason is reported.
    """

    dim: Int
    """The dimension to split, counted in the full tensor with its batch dimension; -1 is the
    last."""

    name: Annotated[str, AfterValidator(_checked_label)] = "part"
    """The name of a part, such as head, token or expert."""

    groups: Annotated[Int, Field(ge=1)] | None = None
    """Number of parts, each a group of neighbouring indices; all groups have the same size. With
    null, each index is a separate part.
    """


class AttentionSpec(SpecModel):
    """Records the weights of fused attention, which the fused call does not return."""

    recompute: Bool = True
    """Whether to recompute the attention weights of the recorded samples and to store their values.
    The weights are computed from query, key, mask and scale, without dropout. They are stored under
    the "attention (recomputed)" role as float32 [samples, heads, queries, keys]. Their size is
    limited by `values.max_elements`."""
