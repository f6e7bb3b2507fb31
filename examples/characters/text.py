"""Text available on every machine with Python: what `help()` prints about the language."""

from __future__ import annotations

import importlib
import inspect
import string
from pathlib import Path

FALLBACK = ("argparse", "asyncio", "collections", "datetime", "decimal", "fractions", "logging")


ALPHABET = "\n " + string.punctuation + string.digits + string.ascii_letters
"""The characters of Python's documentation; its few others are left out."""


def read_text(path: str | None = None) -> str:
    """Return the text of a file, or about half a megabyte of Python's own documentation."""
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    return "".join(c for c in help_topics() or docstrings(*FALLBACK) if c in ALPHABET)


def alphabet_of(text: str) -> str:
    """Return `ALPHABET` if it suffices for a text, and otherwise the characters of the text."""
    characters = {*text}
    return ALPHABET if characters <= {*ALPHABET} else "".join(sorted(characters))


def help_topics() -> str:
    """Return the language reference behind Python's `help("topics")`, or "" if it is missing."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions omit it
        return ""
    return "\n".join(topics[name] for name in sorted(topics))


def docstrings(*modules: str) -> str:
    """Return the docstrings of modules and of their public classes and functions."""
    texts: list[str | None] = []
    for module in map(importlib.import_module, modules):
        members = [member for name, member in sorted(vars(module).items()) if name[0] != "_"]
        texts.append(inspect.getdoc(module))
        texts.extend(inspect.getdoc(member) for member in members if callable(member))
    return "\n".join(text for text in texts if text)
