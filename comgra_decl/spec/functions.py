"""What an entry of `nodes` may say beside modules: functions, parts of tensors, fused attention."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from comgra_decl.spec.base import Bool, Int, SpecModel

FUNCTION_CAPTURES = ("output", "output_grad", "input", "input_grad")
"""What can be captured of a function's call."""

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_SHORT = {"F": "torch.nn.functional", "nn": "torch.nn", "Tensor": "torch.Tensor"}


def _checked_function(name: str) -> str:
    """Returns the full name; whether there is such a function is known when the model runs."""
    if not _DOTTED.fullmatch(name):
        raise ValueError(
            f"{name!r} is not the dotted name of a function, such as 'torch.softmax', 'F.relu' or "
            "'my_package.layers.my_function'"
        )
    first, _, rest = name.partition(".")
    return f"{_SHORT[first]}.{rest}" if first in _SHORT else name


def _checked_label(name: str) -> str:
    if not name.strip() or name != name.strip():
        raise ValueError(f"{name!r} must have a first and a last character other than space")
    return name


FunctionName = Annotated[str, AfterValidator(_checked_function)]


class SplitSpec(SpecModel):
    """Takes each captured tensor apart along one dimension: heads, tokens, experts.

    The parts are further roles of the node, "output.head 0" beside "output", gradients included.
    At most 64 parts; a tensor that cannot be taken apart so stays whole, which the report says.
    """

    dim: Int
    """The dimension that is taken apart, counted in the whole tensor with its batch; -1 is the
    last."""

    name: Annotated[str, AfterValidator(_checked_label)] = "part"
    """What one part is called: head, token, expert."""

    groups: Annotated[Int, Field(ge=1)] | None = None
    """Number of equal groups of neighbouring indices; null makes every index a part."""


class AttentionSpec(SpecModel):
    """Weights of attention that is computed in one fused call, which never shows them."""

    recompute: Bool = True
    """Whether the weights of the recorded samples are computed again from query, key, mask and
    scale, without dropout, and kept as the role "attention (recomputed)": float32 [samples, heads,
    queries, keys]. They are bounded by `values.max_elements`."""
