"""Follow how targets are made of rewards and of a model's own values, as in reinforcement learning.

A target r + gamma V(s') must not continue beyond the end of an episode, and returns are added up
from the last step to the first. Both show in the calls that compute them, and in nothing else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from comgra_decl.hooks.limits import is_capturing
from comgra_decl.stats.support import is_readable

_LEAST_FACTOR = 0.01  # smallest discount
_MOST_ELEMENTS = 1 << 16
_LEAST_SETS = 4  # returns that are written in order
_SAME = frozenset(
    "view reshape squeeze unsqueeze flatten detach to float double clone contiguous expand "
    "view_as __getitem__ select unbind".split()
)
_MASKING = frozenset(
    "masked_fill masked_fill_ where __setitem__ index_put index_put_ masked_scatter".split()
)
_REDUCING = frozenset("max amax min amin minimum gather mean sum logsumexp take_along_dim".split())

Note = Callable[..., Any]


@dataclass(frozen=True)
class _Origin:
    """What is known about a tensor without gradients.

    Attributes:
        factor: the discount that it has been multiplied by; None if there is none.
        masked: whether some of its elements may have been set to zero.
        returned: whether it is the sum of data and a discounted tensor.
        ones: whether it was created as ones.
        index: whether it is computed from integers of a model, such as the index of a maximum.
    """

    factor: float | None = None
    masked: bool = False
    returned: bool = False
    ones: bool = False
    index: bool = False


@dataclass
class Bootstraps:
    """Collects facts about discounted values in a step.

    Attributes:
        is_computed: returns whether a tensor depends on the output of a model.
    """

    is_computed: Callable[[torch.Tensor], bool] | None = None
    _origins: dict[int, tuple[weakref.ref[torch.Tensor], _Origin]] = field(default_factory=dict)
    _written: dict[int, list[int]] = field(default_factory=dict)  # indices of returns, by tensor

    def release(self) -> None:
        """Release all tensors."""
        self._origins, self._written = {}, {}

    def see(self, name: str, args: tuple[Any, ...], result: Any, note: Note) -> None:
        """Follow a call. `note` stores a fact."""
        if is_capturing():  # reading numbers would break the capture of a CUDA graph
            return
        if name in _MASKING:
            self._mask(name, args, result, note)
        elif name in ("ones", "ones_like"):
            self._set(result, _Origin(ones=True))
        elif name in _SAME or name in _REDUCING:
            self._pass_on(args, result)
        elif name in ("mul", "__mul__", "__rmul__"):
            self._multiply(args, result)
        elif name in ("add", "__add__", "__radd__"):
            self._add(args, result, note)

    def _of(self, tensor: Any) -> _Origin | None:
        known = self._origins.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _set(self, tensor: Any, origin: _Origin) -> None:
        if isinstance(tensor, torch.Tensor):
            self._origins[id(tensor)] = weakref.ref(tensor), origin

    def _pass_on(self, args: tuple[Any, ...], result: Any) -> None:
        origin = self._of(args[0]) if args else None
        if origin is not None:
            for each in result if isinstance(result, (tuple, list)) else (result,):
                self._set(each, origin)

    def _mask(self, name: str, args: tuple[Any, ...], result: Any, note: Note) -> None:
        if name == "__setitem__":
            given, index, value = args[0], args[1], args[2]
            origin = self._of(value)
            if isinstance(index, int) and origin is not None and origin.returned:
                written = self._written.setdefault(id(given), [])
                written.append(index)
                if len(written) == _LEAST_SETS and written == sorted(written):
                    note("returns", order="ascending")
            if isinstance(index, torch.Tensor) and isinstance(given, torch.Tensor):
                self._set(given, replace(self._of(given) or _Origin(), masked=True))
            return
        known = [o for each in args if (o := self._of(each)) is not None]
        origin = known[0] if known else _Origin()
        written_to = args[0] if name.endswith("_") else result
        if isinstance(written_to, torch.Tensor) and not written_to.requires_grad:
            self._set(written_to, replace(origin, masked=True))

    def _multiply(self, args: tuple[Any, ...], result: Any) -> None:
        if len(args) < 2 or not isinstance(result, torch.Tensor) or result.requires_grad:
            return
        if not result.is_floating_point() or result.numel() > _MOST_ELEMENTS:
            return
        factor: float | None = None
        masked = returned = index = False
        for each in args[:2]:
            if isinstance(each, (int, float)):
                factor = float(each) if _LEAST_FACTOR <= each < 1 else factor
                continue
            if not isinstance(each, torch.Tensor):
                return
            origin = self._of(each) or _Origin()
            factor = origin.factor if origin.factor is not None else factor
            returned |= origin.returned
            index |= origin.index or (_is_integer(each) and self._computes(each))
            masked |= origin.masked or (not origin.ones and _is_mask(each))
        if factor is not None or masked or returned:
            self._set(result, _Origin(factor, masked, returned, index=index))

    def _add(self, args: tuple[Any, ...], result: Any, note: Note) -> None:
        if len(args) < 2 or not isinstance(result, torch.Tensor) or result.requires_grad:
            return
        if not all(isinstance(each, torch.Tensor) for each in args[:2]):
            return
        origins = [self._of(each) or _Origin() for each in args[:2]]
        for at, origin in enumerate(origins):
            other = args[1 - at]
            if origin.factor is None or origins[1 - at].factor is not None:
                continue
            computed = self._computes(args[at]) and not self._computes(other)
            if computed and not origin.returned and (count := result.numel()) > 1:
                facts = {"factor": origin.factor, "masked": origin.masked, "index": origin.index}
                note("bootstrap", elements=count, **facts)
            self._set(result, _Origin(None, masked=False, returned=True))

    def _computes(self, tensor: torch.Tensor) -> bool:
        return self.is_computed is not None and self.is_computed(tensor)


def _is_integer(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32)


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether a tensor contains only zeros and ones."""
    if tensor.dtype == torch.bool:
        return True
    if not 0 < tensor.numel() <= _MOST_ELEMENTS or tensor.requires_grad or not is_readable(tensor):
        return False
    return bool(((tensor == 0) | (tensor == 1)).all())
