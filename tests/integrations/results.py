"""Results of a program that trains with a library, whose import alone takes seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.forked import forked


class Results:
    """The results of each case; a program is started once for all cases of a kind.

    Args:
        program: its arguments are a folder and the names of cases; it prints their results.
        kinds: the names of cases that one process computes.
        folder: an empty folder.
    """

    def __init__(self, program: Path, kinds: Sequence[Sequence[str]], *, folder: Path) -> None:
        self._program, self._kinds, self._folder = program, kinds, folder
        self._found: dict[str, Any] = {}

    def __getitem__(self, case: str) -> Any:
        if case not in self._found:
            (number,) = [at for at, cases in enumerate(self._kinds) if case in cases]
            folder = self._folder / str(number)
            folder.mkdir()
            self._found |= self._of(folder, self._kinds[number])
        return self._found[case]

    def _of(self, folder: Path, cases: Sequence[str]) -> Mapping[str, Any]:
        done = forked(folder, self._program, folder, *cases)
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("results ")]
        found: dict[str, Any] = json.loads(line.removeprefix("results "))
        return found
