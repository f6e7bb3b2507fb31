"""Functions that make programs, by name."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.neutrality.program import Program

Builder = Callable[[], Program]


class Collection(dict[str, Builder]):
    """The programs of one file; used as a decorator, it takes the name of the function."""

    def __call__(self, function: Builder) -> Builder:
        """Adds a function under its name, with dashes."""
        self[function.__name__.strip("_").replace("_", "-")] = function
        return function
