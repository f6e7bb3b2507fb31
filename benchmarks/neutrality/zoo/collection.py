"""Functions that build programs, by name."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.neutrality.program import Program

Builder = Callable[[], Program]


class Collection(dict[str, Builder]):
    """The programs of one file; a decorator that registers functions by name."""

    def __call__(self, function: Builder) -> Builder:
        """Register a function under its name, with dashes for underscores."""
        self[function.__name__.strip("_").replace("_", "-")] = function
        return function
