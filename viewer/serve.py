"""Serves the viewer from a program of ours: `comgra-decl view FOLDER`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import panel as pn

from comgra_decl.viewer.page import TITLE, create_page


def serve(
    root: str | Path,
    *,
    port: int = 0,
    address: str = "127.0.0.1",
    show: bool = False,
    views: str | Path | None = None,
    on_start: Callable[[str], None] | None = None,
) -> None:
    """Serves the runs below `root` until interrupted (Ctrl-C or SIGTERM); then returns.

    Prints the address to open. Listens on this machine alone unless `address` says otherwise.

    Args:
        root: A folder of runs, a group or a single run; it need not exist yet.
        port: Port to listen on; 0 takes a free one.
        address: Address to listen on; "0.0.0.0" opens the viewer to the network.
        show: Whether to open a browser as well.
        views: A Python file with views of your own (`comgra_decl.viewer.custom`); it is run.
        on_start: Called with the address once the server listens.
    """
    own = [] if views is None else ["--views", str(views)]
    pages = {"viewer": lambda: create_page([str(root), *own])}
    server = pn.serve(  # type: ignore[no-untyped-call]
        pages, port=port, address=address, show=False, start=False, title=TITLE, verbose=False
    )
    host = "127.0.0.1" if address in ("0.0.0.0", "::") else address
    page = f"http://{host}:{server.port}/viewer"
    sys.stdout.write(f"comgra_decl viewer: {page}\nPress Ctrl-C to end.\n")
    sys.stdout.flush()
    if on_start is not None:
        on_start(page)
    if show:
        server.io_loop.add_callback(lambda: server.show("/viewer"))
    _run(server)


def _run(server: Any) -> None:
    def stop(_number: int, _frame: FrameType | None) -> None:
        server.io_loop.add_callback_from_signal(server.io_loop.stop)

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.start()
        server.io_loop.start()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        server.stop()
