"""Creates the page of one browser session."""

from __future__ import annotations

from argparse import ArgumentError, ArgumentParser
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import panel as pn
from bokeh.settings import settings

from comgra_decl.errors import ComgraError
from comgra_decl.query import limit_cache
from comgra_decl.viewer.closed_tabs import forgive_hangups
from comgra_decl.viewer.custom import ViewsFile, shared_views
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.memory import settle
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.panes.base import problem_card
from comgra_decl.viewer.shell import Plain, shell
from comgra_decl.viewer.style import CSS

TITLE = "comgra_decl"
POLL = 500  # milliseconds between checks for new records
_DRAWERS = {"plotly": "plotly", "vega": "altair"}
"""Panel's extensions, and the packages whose figures they show. Other figures need no extension."""

_CHUNKS = 48 << 20
"""Size of the store's cache in bytes.

It is small because each run caches what it has shown. A cache
of 128 MB was no faster, even in a run of 100,000 steps."""


@lru_cache(maxsize=8)
def shared_catalogue(root: Path) -> Catalogue:
    """Return this process's only catalogue of a folder; sessions share open runs."""
    limit_cache(_CHUNKS)
    settle()
    return Catalogue(root)


def create_page(args: Sequence[str] = ()) -> Any:
    """Create the page of one browser session.

    Args:
        args: Folder of runs (default `runs`) and `--views FILE` with custom views, as in
            `panel serve viewer --args FOLDER --views FILE`.
    """
    forgive_hangups()
    _trust_bokeh()
    try:
        root, views = _wanted(args)
        return _page(shared_catalogue(root), None if views is None else shared_views(views))
    except Exception as error:  # noqa: BLE001 - show the reason instead of an empty page
        card = problem_card("The viewer could not start", error)
        return pn.pane.HTML(card, stylesheets=[CSS])  # type: ignore[no-untyped-call]


def _trust_bokeh() -> None:
    """Disable Bokeh's checks for app developers, which take up an eighth of the server's time."""
    settings.perform_document_validation = False
    settings.perform_error_diagnostics = False  # suggestions for misspelt names


def _wanted(args: Sequence[str]) -> tuple[Path, Path | None]:
    """Return the folder of runs and the views file from the arguments."""
    parser = ArgumentParser(prog="viewer", add_help=False, exit_on_error=False)
    parser.add_argument("root", nargs="?", type=Path, default=Path("runs"))
    parser.add_argument("--views", type=Path)
    try:
        known, unknown = parser.parse_known_args(list(args))
    except ArgumentError as error:
        raise ComgraError(f"invalid viewer arguments: {error}.") from None
    if unknown:
        raise ComgraError(
            f"unknown viewer argument {unknown[0]!r}; expected a folder of runs and --views FILE."
        )
    return known.root, known.views


def _load_extensions() -> None:
    """Load what the browser needs for figures that custom views may return, if it is installed."""
    pn.extension(*(name for name, package in _DRAWERS.items() if find_spec(package) is not None))


def _page(catalogue: Catalogue, views: ViewsFile | None) -> Any:
    location = pn.state.location
    query = (location.search or "") if location else ""
    pn.config.design = Plain  # for all components of this session
    if views is not None:
        _load_extensions()
    dashboard = Dashboard(catalogue, query=query, views=views)

    def begin() -> None:  # changes made while the page loads may be lost
        dashboard.screen.start()
        pn.state.add_periodic_callback(dashboard.poll, period=POLL)

    pn.state.onload(begin)
    screen = dashboard.screen
    return shell(head=screen.head, side=screen.side, main=screen.main, title=TITLE)
