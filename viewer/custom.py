"""Custom views: a Python file that is given on the command line and reloaded when it changes.

The file defines `views()`, which returns a list of `View`:

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
from typing import TYPE_CHECKING, Any

from comgra_decl.errors import ComgraError, did_you_mean
from comgra_decl.query import Run
from comgra_decl.viewer.model.brushing import Brush

if TYPE_CHECKING:
    from comgra_decl.viewer.linking import Links, Selected


@dataclass(frozen=True, slots=True)
class Look:
    """The current selection of the page, passed to every custom view.

    Attributes:
        run: Open run; use `run.slot(...)`, `run.row(...)` and so on.
        step: The recorded step.
        type: Step type; "" for all training steps (`type_=look.type or None`).
        node: The selected node.
        role: Which of the node's tensors.
        iteration: Which call of the node within the step, from 0.
        gradient: Gradient pass shown next to the forward pass.
        batch: "mean", "std" or "abs_max", or a recorded sample's number ("0", "1", ...).
        statistic: The selected statistic.
        brush: The brushed samples, steps and runs.
        select: Changes the selection: `look.select(node="head", step=100)`.
        links: Links views with the page; see `stream` and `link`.
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
    brush: Brush
    select: Callable[..., None]
    links: Links | None = None

    @property
    def stream(self) -> Selected:
        """A HoloViews stream of what the page shows, for `hv.DynamicMap`; the same in all views.

        A view that follows the stream needs neither `update` nor `reads`: `View(name, build,
        reads=())`.
        """
        assert self.links is not None
        return self.links.stream

    def link(self, element: Any, *, by: str | None = None) -> Any:
        """Return a HoloViews element whose selections apply to all linked views and to the page.

        Elements are linked by their dimension `sample`, `step` or `run`, which need not be an axis;
        other dimensions may differ.

        Args:
            element: An element, or a layout or an overlay of elements.
            by: The dimension by which it is linked; needed only if the element has several of them.

        Raises:
            UnknownNameError: The element has no such dimension.
        """
        assert self.links is not None
        return self.links.link(element, by=by)

    @property
    def sample(self) -> int | None:
        """Number of the selected sample; None if an aggregate over the batch is selected."""
        return int(self.batch) if self.batch.isdecimal() else None


READS = frozenset(field.name for field in fields(Look)) - {"select", "links"}
"""Values that `View.reads` accepts."""


@dataclass(frozen=True, slots=True)
class View:
    """A custom view.

    Attributes:
        name: Title.
        build: Called with a `Look`; returns any object that Panel can show (Markdown text
            without HTML, a pandas table, a Bokeh, HoloViews or Matplotlib figure, a widget, ...).
        update: Called with the object from `build` and a `Look` when something that the view
            reads changes. Must update the object in place, which is faster than building a new one.
            If None, `build` is called again.
        reads: Attributes of `Look` that the view depends on; "run" includes new records.
    """

    name: str
    build: Callable[[Look], Any]
    update: Callable[[Any, Look], object] | None = None
    reads: frozenset[str] | set[str] | tuple[str, ...] = READS

    def __post_init__(self) -> None:
        for name in self.reads:
            if name not in READS:
                raise ComgraError(
                    f"view {self.name!r} reads {name!r}, which is not an attribute of Look"
                    f"{did_you_mean(name, sorted(READS))}; valid: {', '.join(sorted(READS))}."
                )


class ViewsFile:
    """A file with custom views, shared by all sessions in a process.

    `views` are from the last successful load. `problem` is the error of the latest load, or None.
    `version` is incremented with each load.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.version = 0
        self.views: tuple[View, ...] = ()
        self.problem: Exception | None = None
        self._stamp: object = None
        self.look()

    def look(self) -> int:
        """Reload the file if it has changed, and return the version."""
        stamp = _stamp(self.path)
        if stamp != self._stamp or self.version == 0:
            self._stamp = stamp
            self.version += 1
            try:
                self.views, self.problem = _read(self.path), None
            except Exception as error:  # noqa: BLE001 - user code; the page shows the error
                self.problem = error
        return self.version


@lru_cache(maxsize=8)
def shared_views(path: Path) -> ViewsFile:
    """Return this process's only `ViewsFile` for a path."""
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
        raise ComgraError(f"cannot read the views file {path}: {error.strerror}.") from None
    module = ModuleType("comgra_decl_custom_views")
    module.__file__ = str(path)
    exec(compile(source, str(path), "exec"), module.__dict__)  # the user named this file
    return _checked(path, module)


def _checked(path: Path, module: ModuleType) -> tuple[View, ...]:
    function = getattr(module, "views", None)
    if not callable(function):
        raise ComgraError(
            f"{path} has no `views` function; write `def views(): return [View(name, build)]`."
        )
    views = function()
    if not isinstance(views, list | tuple) or not all(isinstance(view, View) for view in views):
        raise ComgraError(f"`views()` in {path} must return a list of View, got {views!r:.200}.")
    return tuple(views)
