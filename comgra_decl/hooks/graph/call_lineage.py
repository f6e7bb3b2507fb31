"""Update the lineage of a step after each torch call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from comgra_decl.hooks.graph.calls import Call, column, tensors_of
from comgra_decl.hooks.graph.lineage import NO_SOURCES, Lineage, Sources, merged

Values = Sequence[Any]
"""The arguments of a call, positional ones first."""


class Follower:
    """Keeps a lineage up to date, call by call.

    Args:
        lineage: the lineage to update.
        cut: called with the name of the call and its sources when values leave torch.
    """

    def __init__(self, lineage: Lineage, *, cut: Callable[[str, Sources], None]) -> None:
        self._lineage = lineage
        self._cut = cut
        self.recomputed = 0  # nesting depth of code that the backward pass will run again
        self._special: dict[Call, Callable[[Values, Any], None]] = {
            Call.FIRST_ONLY: lambda values, result: self.give(result, tensors_of(values)[:1]),
            Call.SHAPE_OF_FIRST: lambda values, result: self.give(result, tensors_of(values)[1:]),
            Call.ONE_BY_ONE: self._one_by_one,
            Call.IN_PLACE: lambda values, _: self._write(values, overwrite=False),
            Call.IN_PLACE_LISTS: self._write_lists,
            Call.OVERWRITE: lambda values, _: self._write(values, overwrite=True),
            Call.ENTRY: self._enter,
            Call.PACK: self._pack,
            Call.DETACH: self._detach,
            Call.DETACH_IN_PLACE: lambda values, _: self._detach(values, values[0]),
        }

    def follow(
        self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Update the lineage after one finished call."""
        if not kwargs and call is Call.PLAIN:
            self.give(result, tensors_of(args))
        elif not kwargs and call is Call.IN_PLACE:
            self._write(args, overwrite=False)
        else:
            self._follow_special(name, call, args, kwargs, result)

    def _follow_special(
        self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        out = kwargs.get("out")
        values = [*args, *(value for key, value in kwargs.items() if key != "out")]
        if call is Call.CUT:
            self._cut(name, self._lineage.union(tensors_of(values)))
        elif call is Call.NORMALISE:
            self._normalise(args, kwargs, result)
        elif out is not None:
            self._write_out(out, self._lineage.union(tensors_of(values)))
        elif call is Call.PLAIN:
            inputs = tensors_of(values)
            self.give(result, inputs)
            if kwargs.get("inplace") is True and isinstance(result, torch.Tensor):
                self._lineage.write(result, self._lineage.union(inputs), overwrite=False)
        else:
            self._special[call](values, result)

    def give(self, result: Any, inputs: list[torch.Tensor]) -> None:
        """Record that the results of a call were computed from `inputs`, which may be empty."""
        sources = self._lineage.union(inputs)
        recomputed = self.recomputed > 0
        if isinstance(result, torch.Tensor):
            self._lineage.set(result, sources, recomputed=recomputed)
        else:
            for tensor in tensors_of((result,)):
                self._lineage.set(tensor, sources, recomputed=recomputed)

    def _one_by_one(self, values: Values, result: Any) -> None:
        """Handle `broadcast_tensors(a, b)`, which accepts two tensors or one list of tensors."""
        if all(isinstance(value, torch.Tensor) for value in values):
            values = [values]
        results = result if isinstance(result, (tuple, list)) else [result]
        for index, each in enumerate(results):
            self.give(each, column(values, index))

    def _enter(self, values: Values, result: Any) -> None:
        inputs = tensors_of(values)
        if inputs:
            self.give(result, inputs)

    def _pack(self, values: Values, result: Any) -> None:
        self.give(result[0], tensors_of(values))
        self.give(result[1], tensors_of(values[1:]))

    def _write(self, values: Values, *, overwrite: bool) -> None:
        target, *others = tensors_of(values)
        inputs = self._lineage.union(others)
        self._lineage.write(target, inputs, overwrite=overwrite, recomputed=self.recomputed > 0)

    def _write_out(self, out: Any, inputs: Sources) -> None:
        for tensor in tensors_of((out,)):
            self._lineage.write(tensor, inputs, overwrite=True)

    def _write_lists(self, values: Values, _result: Any) -> None:
        targets = values[0] if isinstance(values[0], (tuple, list)) else []
        for index, target in enumerate(targets):
            inputs = self._lineage.union(column(values[1:], index))
            self._lineage.write(target, inputs, overwrite=False)

    def _detach(self, values: Values, result: Any) -> None:
        sources = self._lineage.union(tensors_of(values))
        self._lineage.set(result, Sources(sources.all, frozenset()) if sources.grad else sources)

    def _normalise(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Follow a normalisation: evaluation reads running statistics, training only writes them.

        The signatures in `torch.nn.functional` and in `torch` both start with the input and have
        the two running statistics among their first five arguments.
        """
        own = kwargs.get("use_input_stats", kwargs.get("training"))
        functional = own is not None or "running_mean" in kwargs or len(args) <= _FUNCTIONAL
        running = [kwargs.get("running_mean"), kwargs.get("running_var")]
        running += args[1:3] if functional else args[3:5]
        if own is None and not functional:
            own = args[5]
        statistics = tensors_of(running)
        inputs = [t for t in tensors_of((*args, *kwargs.values())) if not _among(t, statistics)]
        if not own:
            self.give(result, [*inputs, *statistics])
            return
        self.give(result, inputs)
        source = self._lineage.of(inputs[0]) if inputs else NO_SOURCES
        for statistic in statistics:
            self._lineage.write(statistic, merged([source]), overwrite=False)


_FUNCTIONAL = 3  # number of positional arguments that torch.nn.functional passes


def _among(tensor: torch.Tensor, others: list[torch.Tensor]) -> bool:
    return any(tensor is other for other in others)
