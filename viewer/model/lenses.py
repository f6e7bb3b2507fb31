"""Logit lenses of a sample: what each layer predicts, and how it ranks a token over the steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError
from comgra_decl.records import LENS_RANKS, LENS_TOKENS, PICTURE_PREFIX
from comgra_decl.viewer.model.runview import RunView, Slot
from comgra_decl.viewer.model.tokens import labels, words_of

_MOST_STEPS = 24
"""Most steps of a table of ranks besides the selected one; more are thinned out evenly."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """How each layer ranks the explained token of one position, over the steps.

    Attributes:
        position: the position.
        steps: the steps, ascending.
        layers: for each layer its node, and the rank at each step: 1 for the token with the highest
            output, 0 where nothing is known.
    """

    position: int
    steps: tuple[int, ...]
    layers: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Lens:
    """What a language model would predict after each layer, for the selected sample.

    Attributes:
        title: the name of the picture and its method.
        words: the tokens of the input.
        layers: for each layer its node, and for each position the predicted token and the
            probability of the explained token.
        note: additional facts.
        name: the name of the picture.
        explained: what the explained token is.
        ranks: the ranks of the explained token; None if they were not recorded.
    """

    title: str
    words: tuple[str, ...]
    layers: tuple[tuple[str, tuple[tuple[str, float], ...]], ...]
    note: str = ""
    name: str = ""
    explained: str = ""
    ranks: Ranks | None = None


def lenses(
    view: RunView, type_: str, step: int, sample: int, positions: Mapping[str, int]
) -> tuple[Lens, ...]:
    """Return the logit lenses of a sample at a step.

    Args:
        view: the run.
        type_: the type of execution of the probe.
        step: the step.
        sample: the number of the sample.
        positions: the position whose ranks are shown, by the name of the lens; the last one that
            has a rank if none is given.
    """
    found = []
    for name, fact in view.run.picture_facts(step, type=type_).items():
        if fact["method"] != "logit_lens" or "refused" in fact:
            continue
        slots = {
            (slot.node, slot.role): slot
            for slot in view.slots.values()
            if slot.pass_ == PICTURE_PREFIX + name
        }
        layers: list[tuple[str, tuple[tuple[str, float], ...]]] = []
        words: tuple[str, ...] = ()
        for (node, role), slot in slots.items():
            beside = slots.get((node, role + LENS_TOKENS))
            if beside is None:
                continue
            try:
                likely = np.exp(np.asarray(view.value(slot, step, type_)[sample], np.float64))
                tokens = view.value(beside, step, type_)[sample]
            except (ComgraError, IndexError):
                continue
            words = words_of(view, type_, step, sample, len(tokens))
            predicted = labels(view, tokens).tolist()
            layers.append((node, tuple(zip(predicted, likely.tolist(), strict=True))))
        explained = _explained(fact)
        if layers:
            note = (
                "cells: the token that each layer would predict; colour: the probability that the "
                f"layer gives to {explained}"
            )
            rank_slots = {n: s for (n, role), s in slots.items() if role.endswith(LENS_RANKS)}
            ranks = _ranks(view, rank_slots, type_, step, sample, positions.get(name))
            title = f"{name}: logit_lens"
            found.append(Lens(title, words, tuple(layers), note, name, explained, ranks))
    return tuple(found)


def _explained(fact: Mapping[str, Any]) -> str:
    target = fact.get("target")
    if target == "top":
        return "the token that the whole model predicts"
    return "the token that follows in the input" if target == "next" else f"token {target}"


def _ranks(
    view: RunView,
    slots: Mapping[str, Slot],
    type_: str,
    step: int,
    sample: int,
    position: int | None,
) -> Ranks | None:
    every, stride = view.steps(type_), 1
    while len(every) > _MOST_STEPS * stride:
        stride *= 2  # so that a live run goes on with the same steps
    steps = np.unique([*every[::stride].tolist(), step])
    now = [row for slot in slots.values() if (row := _row(view, slot, step, type_, sample)).size]
    if not now:
        return None
    if position is None or not position < len(now[0]):
        known = np.flatnonzero(now[0])
        position = int(known[-1]) if len(known) else len(now[0]) - 1
    layers = []
    for node, slot in slots.items():
        rows = [_row(view, slot, at, type_, sample) for at in steps.tolist()]
        layers.append(
            (node, tuple(int(row[position]) if len(row) > position else 0 for row in rows))
        )
    return Ranks(position, tuple(steps.tolist()), tuple(layers))


def _row(view: RunView, slot: Slot, step: int, type_: str, sample: int) -> NDArray[Any]:
    """Return the ranks of a sample at a step, [positions]; empty if there are none."""
    try:
        row = np.asarray(view.value(slot, step, type_)[sample])
    except (ComgraError, IndexError):
        return np.zeros(0, np.int64)
    return row if row.ndim == 1 else np.zeros(0, np.int64)
