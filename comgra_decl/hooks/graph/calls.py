"""Classify torch calls by how their results depend on their arguments.

Calls are distinguished by name. By default, every result depends on every tensor among the
arguments, which is also what autograd assumes.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

import torch


class Call(Enum):
    """How the results of a torch call depend on its arguments."""

    IGNORED = auto()  # reads metadata, or changes the view of a tensor but not its values
    PLAIN = auto()  # every result from every argument
    FIRST_ONLY = auto()  # the other tensors only provide a shape or dtype
    SHAPE_OF_FIRST = auto()  # the first tensor only provides a shape and a dtype
    ONE_BY_ONE = auto()  # the i-th result from the i-th tensor of each list
    IN_PLACE = auto()
    IN_PLACE_LISTS = auto()
    OVERWRITE = auto()  # in place, replacing all old values
    DETACH = auto()  # the same values, without gradient flow
    DETACH_IN_PLACE = auto()
    NORMALISE = auto()  # batch statistics in training, running ones otherwise
    ENTRY = auto()  # values enter torch from an unknown source, unless they are already tensors
    PACK = auto()  # sequences packed by length: the batch sizes depend only on the lengths
    CUT = auto()  # values leave torch


_FACTS = frozenset(
    "size stride dim ndimension numel nelement storage_offset is_floating_point is_complex "
    "is_contiguous is_signed is_pinned is_shared is_conj is_neg is_inference is_set_to "
    "element_size data_ptr untyped_storage storage register_hook backward "
    "register_post_accumulate_grad_hook retain_grad requires_grad_ share_memory_ rename_ "
    "resize_ resize_as_ t_ transpose_ squeeze_ unsqueeze_ swapaxes_ swapdims_ as_strided_ "
    "__len__ __repr__ __format__ __hash__ get_device __dlpack_device__ _set_grad_enabled "
    "is_same_size result_type".split()
)
_FROM_ELSEWHERE = frozenset("tensor as_tensor asarray from_numpy frombuffer from_dlpack".split())
_CUTS = frozenset(
    "item tolist numpy __array__ __int__ __float__ __bool__ __index__ __complex__ __contains__ "
    "__dlpack__ equal allclose is_nonzero".split()
)
_FIRST_ONLY = frozenset("expand_as view_as reshape_as type_as to sum_to_size".split())
_ONE_BY_ONE = frozenset(
    "broadcast_tensors meshgrid atleast_1d atleast_2d atleast_3d align_tensors".split()
)
_IN_PLACE_OPERATORS = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __ipow__ __imod__ "
    "__iand__ __ior__ __ixor__ __imatmul__ __ilshift__ __irshift__".split()
)
_OVERWRITES = frozenset(
    "copy_ fill_ zero_ set_ normal_ uniform_ bernoulli_ random_ exponential_ cauchy_ geometric_ "
    "log_normal_ trunc_normal_ zeros_ ones_ constant_ eye_ dirac_ xavier_uniform_ xavier_normal_ "
    "kaiming_uniform_ kaiming_normal_ orthogonal_".split()
)
_PROPERTIES = {"data": Call.DETACH} | dict.fromkeys("T H mT mH real imag".split(), Call.PLAIN)


def _classify(name: str) -> Call:
    """Return the category of a call with this name."""
    if name in _FACTS:
        return Call.IGNORED
    if name in _FROM_ELSEWHERE:
        return Call.ENTRY
    if name in _CUTS:
        return Call.CUT
    if name in _FIRST_ONLY:
        return Call.FIRST_ONLY
    if name == "_pack_padded_sequence":
        return Call.PACK
    if name == "detach":
        return Call.DETACH
    if name.endswith("_like") or name.startswith("new_"):
        return Call.SHAPE_OF_FIRST
    if name in ("batch_norm", "instance_norm"):
        return Call.NORMALISE
    return _classify_writing(name)


def _classify_writing(name: str) -> Call:
    if name == "detach_":
        return Call.DETACH_IN_PLACE
    if name in _OVERWRITES:
        return Call.OVERWRITE
    written = name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
    if name.startswith("_foreach_"):
        return Call.IN_PLACE_LISTS if written else Call.ONE_BY_ONE
    if name in _ONE_BY_ONE:
        return Call.ONE_BY_ONE
    return Call.IN_PLACE if written else Call.PLAIN


_known: dict[str, Call] = {}


def meaning(func: Any) -> tuple[str, Call]:
    """Return the name of a torch function and the category of its calls."""
    name = getattr(func, "__name__", "")
    if name == "__get__":  # a property: `.shape`, `.T`, `.data`
        attribute = getattr(getattr(func, "__self__", None), "__name__", name)
        return attribute, _PROPERTIES.get(attribute, Call.IGNORED)
    if name == "__set__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", name)
        return attribute, Call.OVERWRITE if attribute in _PROPERTIES else Call.IGNORED
    call = _known.get(name)
    if call is None:
        call = _known[name] = _classify(name)
    return name, call


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments or results of a torch call, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += tensors_of(value)
        elif isinstance(value, dict):
            found += tensors_of(value.values())
    return found


def column(values: Iterable[Any], index: int) -> list[torch.Tensor]:
    """Return the tensors that contribute to the `index`-th result of a call that takes lists.

    A list contributes its `index`-th tensor; a single tensor contributes to every result.
    """
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)) and index < len(value):
            found += tensors_of([value[index]])
    return found
