"""Read the tokens that the ids in a model's inputs stand for from a tokenizer's file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comgra_decl.errors import SpecError

_MOST = 2_000_000
"""Largest id of a token; more would be a mistake in the file."""


def read_tokens(path: str) -> list[str]:
    """Return the tokens in a file in the order of their ids; "" for unused ids.

    Bytes that a byte-level tokenizer has written as letters become text again, and the marks of
    SentencePiece become spaces.

    Raises:
        SpecError: the file does not exist, or is none of the supported formats.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _problem(path, f"cannot be read: {error}") from error
    if not path.endswith(".json"):
        return text.split("\n")[: text.count("\n") + (not text.endswith("\n"))]
    try:
        content = json.loads(text)
        return _in_order(content)
    except (ValueError, TypeError, AttributeError) as error:
        raise _problem(path, "contains no tokens with ids") from error


def _problem(path: str, what: str) -> SpecError:
    problem = (
        f"comgra.tokens.file: {path!r} {what}; supported are a tokenizer.json, a JSON list of "
        "tokens or mapping of tokens to ids, and text with one token per line"
    )
    return SpecError([problem])


def _in_order(content: Any) -> list[str]:
    ids: dict[Any, Any] = {}
    if isinstance(content, Mapping) and "model" in content:
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram: [token, score] in the order of the ids
            vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
        ids |= vocabulary
        ids |= {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    else:
        ids |= content if isinstance(content, Mapping) else {t: i for i, t in enumerate(content)}
    if not ids or not all(isinstance(t, str) and type(i) is int for t, i in ids.items()):
        raise ValueError("not a mapping of tokens to ids")
    if min(ids.values()) < 0 or max(ids.values()) > _MOST:
        raise ValueError("an id is out of range")
    tokens = [""] * (max(ids.values()) + 1)
    as_bytes = "\u0120" in "".join(ids)  # the letter that stands for the byte of a space
    for token, i in ids.items():
        tokens[i] = _as_text(token) if as_bytes else token.replace("\u2581", " ")
    return tokens


def _letters() -> dict[str, int]:
    """Return the byte for each letter, as in `bytes_to_unicode` of GPT-2's encoder.

    Printable bytes stand for themselves; the others are numbered from U+0100.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_LETTERS = _letters()


def _as_text(token: str) -> str:
    if not all(letter in _LETTERS for letter in token):
        return token  # a special token
    return bytes(_LETTERS[letter] for letter in token).decode("utf-8", errors="replace")
