"""The tokens that ids in inputs and targets stand for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError
from comgra_decl.spec.globs import compile_text
from comgra_decl.viewer.model.runview import RunView, Slot
from comgra_decl.visible import visible

_SPACES = {" ": "\u2423", "\n": "\u23ce", "\t": "\u21e5"}


def has_tokens(view: RunView, slot: Slot) -> bool:
    """Return whether the integers in a tensor are ids of declared tokens."""
    given = slot.kind in ("input", "target") or _is_looked_up(slot)
    if not given or slot.pass_ != "forward" or "int" not in slot.dtype:
        return False
    return view.now(("has tokens", slot.id), lambda: bool(_words(view)) and _declared(view, slot))


def _is_looked_up(slot: Slot) -> bool:
    return slot.module_class.startswith("Embedding") and slot.role.startswith("input")


def _words(view: RunView) -> tuple[str, ...]:
    def read() -> tuple[str, ...]:
        try:
            return view.run.tokens
        except ComgraError:  # damaged
            return ()

    return view.now("tokens", read)


def _declared(view: RunView, slot: Slot) -> bool:
    declared = view.spec.tokens
    assert declared is not None

    name = slot.role.removeprefix("input.")
    if _is_looked_up(slot):
        name = slot.node.rpartition(".")[2]

    def named(patterns: Iterable[str]) -> bool:
        return any(compile_text(pattern).fullmatch(name) for pattern in patterns)

    return named(declared.inputs) and not named(declared.exclude)


def spelled(view: RunView, ids: NDArray[Any]) -> list[str]:
    """Return the token for each id; ids that have no token are unchanged."""
    words = _words(view)
    return [words[i] if 0 <= i < len(words) and words[i] else str(i) for i in ids.ravel().tolist()]


def labels(view: RunView, ids: NDArray[Any]) -> NDArray[np.object_]:
    """Return a label for each id, of the same shape; see `label`."""
    out = np.empty(ids.size, object)
    out[:] = [label(word) for word in spelled(view, ids)]
    return out.reshape(ids.shape)


def words_of(view: RunView, type_: str, step: int, sample: int, size: int) -> tuple[str, ...]:
    """Return the tokens of a sample, as text if they are declared; () if there are none."""
    for slot in view.slots.values():
        if slot.kind != "input" or slot.pass_ != "forward" or "int" not in slot.dtype:
            continue
        try:
            ids = view.value(slot, step, type_)
        except ComgraError:
            continue
        if ids.ndim == 2 and ids.shape[1] == size and sample < len(ids):
            return tuple(labels(view, ids[sample]).tolist())
    return ()


def joined(words: Iterable[str]) -> str:
    """Return tokens as text. Spaces are added unless tokens are letters or contain the spaces.

    Single digits are not letters, because they are numbers of tokens as a rule.
    """
    parts = [*words]
    letters = all(len(part) == 1 for part in parts) and not all(map(str.isdigit, parts))
    spaced = any(len(part) > 1 and part.startswith(" ") for part in parts)
    return ("" if letters or spaced else " ").join(parts)


def label(word: str) -> str:
    """Return a token as it is shown: white space as a sign, and invisible characters escaped."""
    blank = word.isspace() and all(letter in _SPACES for letter in word)
    return "".join(_SPACES[letter] for letter in word) if blank else visible(word)
