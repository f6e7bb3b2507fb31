"""Outputs that do not change although their inputs do."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    NO_SLOTS,
    Bools,
    Mask,
    Measured,
    Previous,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    per_run,
    sources_of,
)

_COMPARED = (("mean", "mean"), ("mean", "std"), ("l2", "mean"), ("l2", "std"))


class UnchangedOutput(SlotRule):
    """Outputs that do not change although their inputs do."""

    name = "unchanged_output"
    certainty = 0.5
    definition = (
        "For `patience` records in a row, the mean and the l2 norm of an output have exactly the "
        "same average and the same standard deviation across the batch as in the previous record. "
        "Meanwhile, these statistics change for at least one floating-point tensor from which "
        "the output is computed, according to the dependency graph. Outputs that consist of "
        "zeros and ones are ignored, because they can change without affecting these statistics."
    )
    source = (
        "SageMaker Debugger, which compares tensors over the last three saved steps. This rule "
        "requires exact equality and changing inputs."
    )
    advice = (
        "Look for an operation that discards the input: a softmax over a dimension of size one, a "
        "clamp or saturated function, a cached result, or a multiplication by zero."
    )
    explained_by = ("nonfinite", "dead_units", "all_zero", "saturated", "input_independence")
    of_state = True
    statistics = ("mean", "std", "l2", "min", "max")
    evidence, of_graph = "mean", True
    needs = "outputs and their inputs, with `graph: true`"

    _before = per_run(lambda: [Previous() for _ in _COMPARED])
    _followed = NO_SLOTS  # outputs and their inputs
    _entering = NO_SLOTS  # inputs of all outputs, concatenated, as indices into `_followed`
    _starts = NO_SLOTS  # start of each output's inputs in `_entering`

    def wants(self, table: SlotTable) -> Mask:
        """Return outputs of modules that are computed from floating-point tensors."""
        values = table.floating & ~table.parameters
        known = sources_of(self.scene)
        wanted = {
            slot: given
            for slot in sorted(known)
            if table.infos[slot].key.node
            != "prediction"  # also computed from targets, such as a cosine similarity
            and table.outputs[slot]
            and (given := [s for s in known[slot] if values[s]])
        }
        entering = np.array([s for given in wanted.values() for s in given], np.int64)
        self._followed = np.unique(np.append(entering, [*wanted]).astype(np.int64))
        self._entering = np.searchsorted(self._followed, entering)
        self._starts = np.cumsum([0, *map(len, wanted.values())], dtype=np.int64)[:-1]
        return np.isin(np.arange(len(table)), [*wanted])

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compare each output and its inputs with the previous record."""
        followed = self._followed
        same = np.ones((len(window), len(followed)), np.bool_)
        changed = np.zeros(same.shape, np.bool_)
        for (name, over), before in zip(_COMPARED, self._before, strict=True):
            value = window.read(name, followed, over).astype(np.float64)
            known = before.look(followed, value)
            same &= value == known
            changed |= (value != known) & ~np.isnan(value) & ~np.isnan(known)
        entering = np.logical_or.reduceat(changed[:, self._entering], self._starts, axis=1)
        hit = same[:, np.searchsorted(followed, at)] & entering
        return hit & ~_ones_and_zeros(window, at) if hit.any() else hit, window.read("mean", at)

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} is exactly the same in every record "
            f"{self.streak.since(slot)}, although its inputs change."
        )


def _ones_and_zeros(window: Window, at: Slots) -> Bools:
    """Return where a tensor consists of zeros and ones, like a one-hot encoding."""
    total = window.read("mean", at).astype(np.float64) * window.elements(at)
    squares = window.read("l2", at).astype(np.float64) ** 2
    between = (window.read("min", at) >= 0) & (window.read("max", at) <= 1)
    both = (window.read("std", at) > 0) & (np.abs(total - squares) <= 1e-4 * squares)
    return np.asarray(between & both)
