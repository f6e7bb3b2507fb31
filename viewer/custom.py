"""Views of your own: a Python file, given on the command line, read again when it changes.

The file has a function `views()` that returns a list of `View`:

```python
from comgra_decl.viewer.custom import Look, View


def build(look: Look):
    return f"{look.node} at step {look.step}"


def views():
    return [View("Where am I", build)]
```
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from comgra_decl.errors import ComgraError, did_you_mean
from comgra_decl.query import Run


@dataclass(frozen=True, slots=True)
class Look:
    """What the person is looking at; all that a view of yours is told.

    Attributes:
        run: The open run, for `run.series(...)`, `run.value(...)` and so on.
        step: The recorded step.
        type: Type of execution, "" for all training steps (`type_=look.type or None`).
        node: The selected node.
        role: Which of its tensors.
        iteration: The k-th call of the node within the step.
        gradient: The pass that is shown beside the forward one.
        batch: "mean", "std" or "abs_max", or the number of a recorded sample ("0", "1", ...).
        statistic: The selected statistic.
        select: Shows something else: `look.select(node="head", step=100)`.
    """

    run: Run
    step: int | None
    type: str
    node: str
    role: str
    iteration: int
    gradient: str
    batch: str
    statistic: str
    select: Callable[..., None]

    @property
    def sample(self) -> int | None:
        """The chosen sample, or None while an aggregate over the batch is chosen."""
        return int(self.batch) if self.batch.isdecimal() else None


READS = frozenset(field.name for field in fields(Look)) - {"select"}
"""What a view may say that it reads."""


@dataclass(frozen=True, slots=True)
class View:
    """One view of yours.

    Attributes:
        name: Its title.
        build: Called with a `Look`; returns what to show: anything that Panel can (text in
            Markdown, a table of pandas, a figure of Bokeh, HoloViews or Matplotlib, a widget, ...).
        update: Called with what `build` has returned and a `Look` when something that the view
            reads has changed; changes it in place, which is quicker. None: `build` is called again.
        reads: Names of `Look` on which the view depends; new records of the run count as "run".
    """

    name: str
    build: Callable[[Look], Any]
    update: Callable[[Any, Look], object] | None = None
    reads: frozenset[str] | set[str] | tuple[str, ...] = READS

    def __post_init__(self) -> None:
        for name in self.reads:
            if name not in READS:
                raise ComgraError(
                    f"the view {self.name!r} reads {name!r}, which is not part of what is shown"
                    f"{did_you_mean(name, sorted(READS))}; there are {', '.join(sorted(READS))}."
                )


class ViewsFile:
    """The file of views; shared by all sessions of a process.

    `views` are those of the last reading that went well; `problem` is the error of the newest
    reading, None if it went well. `version` grows with each reading.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.version = 0
        self.views: tuple[View, ...] = ()
        self.problem: Exception | None = None
        self._stamp: object = None
        self.look()

    def look(self) -> int:
        """Reads the file if it has changed; returns the version."""
        stamp = _stamp(self.path)
        if stamp != self._stamp or self.version == 0:
            self._stamp = stamp
            self.version += 1
            try:
                self.views, self.problem = _read(self.path), None
            except Exception as error:  # noqa: BLE001 - it is the user's code; it is shown to them
                self.problem = error
        return self.version


@lru_cache(maxsize=8)
def shared_views(path: Path) -> ViewsFile:
    """Returns the one `ViewsFile` of a path in this process."""
    return ViewsFile(path)


def _stamp(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[View, ...]:
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ComgraError(f"the file of views {path} cannot be read: {error.strerror}.") from None
    module = ModuleType("comgra_decl_custom_views")
    module.__file__ = str(path)
    exec(compile(source, str(path), "exec"), module.__dict__)  # the user has given it
    return _checked(path, module)


def _checked(path: Path, module: ModuleType) -> tuple[View, ...]:
    function = getattr(module, "views", None)
    if not callable(function):
        raise ComgraError(
            f"{path} has no function `views`; write `def views(): return [View(name, build)]`."
        )
    views = function()
    if not isinstance(views, list | tuple) or not all(isinstance(view, View) for view in views):
        raise ComgraError(f"`views()` in {path} must return a list of View, not {views!r:.200}.")
    return tuple(views)
