"""The command `comgra-decl view`."""

from __future__ import annotations

import errno
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from comgra_decl.cli.printing import Root
from comgra_decl.errors import ComgraError, RunNotFoundError

PANEL = "Look"

_CANNOT_LISTEN = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)
"""The port is in use, the address is not local, or the port requires privileges."""


def command(
    root: Root = Path("runs"),
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 selects a free port.", min=0, max=65535)
    ] = 5006,
    address: Annotated[str, typer.Option(help="Network address to listen on.")] = "127.0.0.1",
    show: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    prefix: Annotated[
        str, typer.Option(help="URL path under which a reverse proxy serves the viewer.")
    ] = "",
    allow_websocket_origin: Annotated[
        list[str] | None,
        typer.Option(help="Another host:port at which browsers open the page; can be repeated."),
    ] = None,
    basic_auth: Annotated[
        str | None,
        typer.Option(
            help='Password to require, or a JSON file such as {"name": "password"}.',
            envvar="COMGRA_VIEW_AUTH",
        ),
    ] = None,
    use_xheaders: Annotated[
        bool,
        typer.Option(
            "--use-xheaders",
            help="Trust the X-Forwarded-For and X-Forwarded-Proto headers sent by a proxy.",
        ),
    ] = False,
    views: Annotated[
        Path | None,
        typer.Option(
            help="Python file that defines custom views; it is executed.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
) -> None:
    """View runs in a browser, even while they are being recorded."""
    from comgra_decl.viewer.serve import Access, clean_prefix, serve

    origins = tuple(allow_websocket_origin or ())
    _check(root)
    access = Access(address, clean_prefix(prefix), origins, basic_auth, use_xheaders)
    try:
        serve(root, port=port, access=access, show=show, views=views)
    except OSError as error:
        unknown = isinstance(error, socket.gaierror)
        if isinstance(error, ComgraError) or not (unknown or error.errno in _CANNOT_LISTEN):
            raise
        if unknown:
            raise ComgraError(
                f"unknown network address {address!r} ({error.strerror}); --address must be a "
                "name or IP address of this machine, such as 127.0.0.1"
            ) from None
        raise ComgraError(
            f"the viewer cannot listen on {address}:{port} ({error.strerror}); "
            "choose another port with --port, or a free one with --port 0"
        ) from None


def _check(root: Path) -> None:
    """Reject a root that cannot contain runs; warn if the folder does not exist yet."""
    from comgra_decl.query import location, require_folder

    place = location(root)
    try:
        require_folder(place)
    except RunNotFoundError as error:
        if root.exists() or any(parent.is_file() for parent in root.parents):
            raise
        sys.stderr.write(
            f"comgra-decl: {error} The page will show runs as soon as the folder contains any.\n"
        )
