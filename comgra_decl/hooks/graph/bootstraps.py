"""Follow how targets are made of rewards and of a model's own values, as in reinforcement learning.

A target r + gamma V(s') must not continue beyond the end of an episode, and returns are added up
from the last step to the first. Both show in the calls that compute them, and in nothing else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from comgra_decl.hooks.limits import is_capturing
from comgra_decl.stats.support import is_readable

_LEAST_FACTOR = 0.01  # smallest discount
_MOST_ELEMENTS = 1 << 16
_LEAST_DISCOUNT, _MOST_DISCOUNTS = 0.3, 8  # of the powers of a discount
_LEAST_SETS = 4  # returns that are written in order
_SAME = frozenset(
    "view reshape squeeze unsqueeze flatten detach to float double clone contiguous expand "
    "view_as __getitem__ select unbind".split()
)
_PRODUCTS = frozenset("mul mul_ __mul__ __rmul__ __imul__ multiply".split())
_SUMS = frozenset("add add_ __add__ __radd__ __iadd__".split())
_MASKING = frozenset(
    "masked_fill masked_fill_ where __setitem__ index_put index_put_ masked_scatter".split()
)
_REDUCING = frozenset(
    "max amax min amin minimum gather mean sum logsumexp take_along_dim topk".split()
)
_PICKING = frozenset("argmax argmin max min topk".split())

Note = Callable[..., Any]


@dataclass(frozen=True)
class _Origin:
    """What is known about a tensor without gradients.

    Attributes:
        factor: the discount that it has been multiplied by; None if there is none.
        masked: whether some of its elements may have been set to zero.
        returned: whether it is the sum of data and a discounted tensor.
        index: whether it is computed from integers of a model, such as the index of a maximum.
        kept: the share of a mask that is not zero; None if it is not known.
        before: for a sum, the id of the tensor that was discounted, such as the next return.
        fact: the fact stored about the sum.
    """

    factor: float | None = None
    masked: bool = False
    returned: bool = False
    index: bool = False
    kept: float | None = None
    before: int = 0
    fact: dict[str, Any] | None = None


@dataclass
class Bootstraps:
    """Collects facts about discounted values in a step.

    Attributes:
        computed_sources: returns the outputs of models that a tensor depends on.
    """

    computed_sources: Callable[[torch.Tensor], frozenset[int]] | None = None
    _origins: dict[int, tuple[weakref.ref[torch.Tensor], _Origin]] = field(default_factory=dict)
    _written: dict[int, list[int]] = field(default_factory=dict)  # indices of returns, by tensor
    # results of calls by id, and what they depended on before any was known as a module's output
    _made: dict[int, tuple[weakref.ref[torch.Tensor], frozenset[int]]] = field(default_factory=dict)

    def release(self) -> None:
        """Release all tensors."""
        self._origins, self._written, self._made = {}, {}, {}

    def see(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        note: Note,
    ) -> None:
        """Follow a call. `note` stores a fact."""
        if is_capturing():  # reading numbers would break the capture of a CUDA graph
            return
        if name in _MASKING:
            self._mask(name, args, result, note)
        elif name in ("ones", "ones_like"):  # known, so not taken for a mask
            self._set(result, _Origin())
        elif name in _SAME or name in _REDUCING or name in _PICKING:
            self._pass_on(name, args, result)
        elif name in ("stack", "cat"):
            self._order(args, note)
        elif name in _PRODUCTS:
            self._multiply(args, result)
        elif name in _SUMS:
            self._add(args, kwargs.get("alpha", 1), result, note)
        elif name in ("addcmul", "addcmul_") and len(args) > 2:
            self._add_product(args, kwargs.get("value", 1), result, note)
        self._make(name, result)

    def _make(self, name: str, result: Any) -> None:
        """Store what the result of a call depends on, unless it only has another form."""
        if name not in _SAME and _is_numbers(result) and (sources := self._sources(result)):
            self._made[id(result)] = weakref.ref(result), sources

    def _of(self, tensor: Any) -> _Origin | None:
        known = self._origins.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _set(self, tensor: Any, origin: _Origin) -> None:
        if isinstance(tensor, torch.Tensor):
            self._origins[id(tensor)] = weakref.ref(tensor), origin

    def _pass_on(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        origin = self._of(args[0]) if args else None
        if origin is not None:
            for each in result if isinstance(result, (tuple, list)) else (result,):
                self._set(each, origin)
        if name in _PICKING:
            self._pick(args, result)

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
                origin = self._of(given) or _Origin()
                self._set(given, replace(origin, masked=True, kept=_share_left(given)))
            return
        known = [o for each in args if (o := self._of(each)) is not None]
        origin = known[0] if known else _Origin()
        if origin.fact is not None:  # the whole target is replaced where an episode ends
            origin.fact["masked"] = True
        written_to = args[0] if name.endswith("_") else result
        if isinstance(written_to, torch.Tensor) and not written_to.requires_grad:
            self._set(written_to, replace(origin, masked=True, kept=_share_left(written_to)))

    def _pick(self, args: tuple[Any, ...], result: Any) -> None:
        """Store the indices of a model's largest values."""
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, torch.Tensor) and _is_integer(each) and self._computes(args[0]):
                self._set(each, _Origin(index=True))

    def _order(self, args: tuple[Any, ...], note: Note) -> None:
        """Note a list of sums each of which contains the previous one."""
        parts = args[0] if isinstance(args[0], (list, tuple)) else ()
        ids = [id(each) for each in parts]
        before = [0 if (o := self._of(each)) is None else o.before for each in parts]
        ascending = sum(a == b for a, b in zip(before[1:], ids, strict=False))
        descending = sum(a == b for a, b in zip(before, ids[1:], strict=False))
        if ascending >= _LEAST_SETS - 1 and not descending:
            note("returns", order="ascending")

    def _multiply(self, args: tuple[Any, ...], result: Any) -> None:
        if len(args) < 2 or not _is_numbers(result):
            return
        product = self._product(args[:2])
        if product is not None:
            self._set(result, product)

    def _product(self, operands: tuple[Any, ...]) -> _Origin | None:
        """Return what is known about a product; None if nothing."""
        factor: float | None = None
        masked = returned = index = False
        kept: float | None = None
        before = 0
        for each in operands:
            if isinstance(each, (int, float)):
                factor = float(each) if _LEAST_FACTOR <= each < 1 else factor
                continue
            if not isinstance(each, torch.Tensor):
                return None
            origin = self._of(each)
            if origin is None:
                origin = _of_data(each)
            if origin.factor is None and not origin.masked:
                before = id(each)
            factor = origin.factor if origin.factor is not None else factor
            returned |= origin.returned
            index |= origin.index or (_is_integer(each) and self._computes(each))
            masked |= origin.masked
            known = [share for share in (kept, origin.kept) if share is not None]
            kept = min(known, default=None)
        if factor is None and not masked and not returned:
            return None
        return _Origin(factor, masked, returned, index=index, kept=kept, before=before)

    def _add(self, args: tuple[Any, ...], alpha: Any, result: Any, note: Note) -> None:
        if len(args) < 2 or not _is_numbers(result):
            return
        first, second = args[:2]
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
            return
        origins = [self._of(first) or _Origin(), self._of(second) or _Origin()]
        rewards = [
            second if self._is_value(first, second) else None,
            first if self._is_value(second, first) else None,
        ]
        if isinstance(alpha, float) and _LEAST_FACTOR <= alpha < 1:
            origins[1] = replace(origins[1], factor=alpha, before=id(second))
        self._sum(origins, rewards, result, note)

    def _add_product(self, args: tuple[Any, ...], value: Any, result: Any, note: Note) -> None:
        if not _is_numbers(result) or not all(isinstance(t, torch.Tensor) for t in args[:3]):
            return
        given, *factors = args[:3]
        product = self._product((*factors, value))
        is_value = any(self._is_value(each, given) for each in factors)
        origins = [self._of(given) or _Origin(), product or _Origin()]
        self._sum(origins, [None, given if is_value else None], result, note)

    def _sum(
        self,
        origins: list[_Origin],
        rewards: list[torch.Tensor | None],
        result: torch.Tensor,
        note: Note,
    ) -> None:
        """Note the sum of data and a discounted value.

        Args:
            origins: what is known about the two operands.
            rewards: for each that may be a value computed by a model, the other operand.
            result: the sum.
            note: stores a fact.
        """
        for at, origin in enumerate(origins):
            if origin.factor is None or origins[1 - at].factor is not None:
                continue
            fact = None
            reward = rewards[at]
            if reward is not None and not origin.returned and (count := result.numel()) > 1:
                facts: dict[str, Any] = {"factor": origin.factor, "masked": origin.masked}
                facts["index"] = origin.index
                negative = is_readable(reward) and bool((reward < 0).any())
                facts["kept"] = origin.kept if origin.kept is None else round(origin.kept, 4)
                fact = note("bootstrap", elements=count, negative=negative, **facts)
            self._set(result, _Origin(returned=True, before=origin.before, fact=fact))
            return

    def _sources(self, tensor: torch.Tensor) -> frozenset[int]:
        return frozenset() if self.computed_sources is None else self.computed_sources(tensor)

    def _computes(self, tensor: torch.Tensor) -> bool:
        return bool(self._sources(tensor))

    def _is_value(self, tensor: torch.Tensor, reward: torch.Tensor) -> bool:
        """Whether a tensor is computed by a model, and the other one is a reward.

        A reward is data, or the program has computed it from other outputs than the value, such as
        the actions of a policy.
        """
        value, others = self._sources(tensor), self._sources(reward)
        if not value or not others:
            return bool(value)
        made = self._made.get(id(reward))
        is_made = made is not None and made[0]() is reward and made[1] == others
        return is_made and value.isdisjoint(others)


def _is_integer(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32)


def _is_numbers(result: Any) -> bool:
    """Whether a result may be a value: floating-point numbers without a gradient."""
    if not isinstance(result, torch.Tensor) or result.requires_grad:
        return False
    return result.is_floating_point() and result.numel() <= _MOST_ELEMENTS


def _of_data(tensor: torch.Tensor) -> _Origin:
    """Return what the numbers of a tensor reveal about it.

    Zeros among equal numbers are a mask. So are equal numbers, as no episode may have ended.
    """
    if tensor.dtype == torch.bool:
        return _Origin(masked=True, kept=_kept(tensor))
    if not 0 < tensor.numel() <= _MOST_ELEMENTS or tensor.requires_grad or not is_readable(tensor):
        return _Origin()
    if tensor.is_complex():
        return _Origin()
    others = tensor[tensor != 0]
    low, high = (float(x) for x in others.aminmax()) if others.numel() else (1.0, 1.0)
    if _LEAST_DISCOUNT <= low < high < 1 and len(others.unique()) <= _MOST_DISCOUNTS < len(others):
        low = high  # gamma ** n for returns over n steps
    if low != high or not (low == 1 or (tensor.is_floating_point() and _LEAST_FACTOR <= low < 1)):
        return _Origin()
    discount = None if low == 1 else round(low, 6)
    several = tensor.numel() > 1
    return _Origin(discount, masked=discount is None or several, kept=_kept(tensor))


def _share_left(values: torch.Tensor) -> float | None:
    """Return the share of values that are not zero after a mask was applied."""
    return _kept(values) if values.is_floating_point() and _is_numbers(values) else None


def _kept(mask: torch.Tensor) -> float | None:
    """Return the share of a mask that is not zero; None for a single number."""
    if mask.numel() < 2 or not is_readable(mask):
        return None
    return float((mask != 0).to(torch.float32).mean())
