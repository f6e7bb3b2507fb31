"""Starts the viewer's server for `comgra-decl view FOLDER`."""

from __future__ import annotations

import ipaddress
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import panel as pn

from comgra_decl.errors import ComgraError
from comgra_decl.viewer.gate import Gate, Names
from comgra_decl.viewer.login import Login
from comgra_decl.viewer.page import TITLE, create_page
from comgra_decl.viewer.panel_private import guard

_LIMITS = {
    "idle_connection_timeout": 120,  # seconds in which a client must send request headers
    "body_timeout": 60,
    "max_body_size": 1 << 20,  # enough for a login form, the longest body
    "max_header_size": 1 << 16,
}


@dataclass(frozen=True, slots=True)
class Access:
    """Where the viewer listens and who may log in.

    Attributes:
        address: Network address to bind.
        prefix: Path prefix behind a reverse proxy, such as "/comgra".
        origins: `host:port` of other machines or proxies through which users open the viewer. All
            other names are refused.
        basic_auth: A password, or a JSON file `{"name": "password"}`. None disables the login.
        use_xheaders: Whether to trust the proxy's X-Forwarded-For and X-Forwarded-Proto headers.
            Safe only if every request comes through the proxy.
    """

    address: str = "127.0.0.1"
    prefix: str = ""
    origins: tuple[str, ...] = ()
    basic_auth: str | None = None
    use_xheaders: bool = False

    def options(self) -> dict[str, Any]:
        """Return keyword arguments for Panel's server."""
        limits = {**_LIMITS, "xheaders": self.use_xheaders}
        options = {"address": self.address, "prefix": self.prefix, "http_server_kwargs": limits}
        return options | ({"websocket_origin": list(self.origins)} if self.origins else {})

    @property
    def warning(self) -> str:
        """Security warning about this access; "" if it is safe."""
        if self.basic_auth or _is_loopback(self.address):
            return ""
        return (
            f"Warning: anyone who can reach {self.address} can view the runs without a password."
            " Set one with --basic-auth, or listen on 127.0.0.1 and use an SSH tunnel."
        )


def serve(
    root: str | Path,
    *,
    port: int = 0,
    access: Access = Access(),
    show: bool = False,
    views: str | Path | None = None,
    on_start: Callable[[str], None] | None = None,
) -> None:
    """Serve the runs below `root` until Ctrl-C or SIGTERM, then return.

    Prints the URL. Listens on this machine only, unless `access` sets another address.

    Args:
        root: Folder of runs, a group or a single run; may not exist yet.
        port: Port to listen on; 0 selects a free port.
        access: Address, prefix and password.
        show: Whether to open a browser if there is a display.
        views: Python file with custom views (`comgra_decl.viewer.custom`), which is executed.
        on_start: Called with the URL once the server listens.
    """
    own = [] if views is None else ["--views", str(views)]
    pages = {"viewer": lambda: create_page([str(root), *own])}
    login = Login(access.basic_auth) if access.basic_auth else None
    options = access.options() | (login.options if login else {})
    server = pn.serve(  # type: ignore[no-untyped-call]
        pages, port=port, show=False, start=False, title=TITLE, verbose=False, **options
    )
    names = Names(access.address, access.origins)
    has_passed = login.has_passed if login else None
    guard(server, lambda application: Gate(application, names, authenticated=has_passed))
    host = "127.0.0.1" if access.address in ("", "0.0.0.0", "::") else access.address
    page = f"http://{f'[{host}]' if ':' in host else host}:{server.port}{server.prefix}/viewer"
    sys.stdout.write(f"comgra_decl viewer: {page}\nPress Ctrl-C to stop.\n")
    sys.stdout.flush()
    if access.warning:
        sys.stderr.write(f"{access.warning}\n")
    if on_start is not None:
        on_start(page)
    if show and has_display():
        server.io_loop.add_callback(lambda: server.show("/viewer"))
    _run(server)


def has_display() -> bool:
    """Return whether this machine can show a browser window; False over SSH."""
    if sys.platform in ("darwin", "win32"):
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


def clean_prefix(prefix: str) -> str:
    """Return a prefix as "/path"; "" if empty.

    Raises:
        ComgraError: The prefix is not a plain path.
    """
    parts = prefix.strip("/").split("/")
    if parts == [""]:
        return ""
    if not all(part.replace("-", "").replace("_", "").isalnum() for part in parts):
        raise ComgraError(f"--prefix must be a plain path like /comgra, got {prefix!r}")
    return "/" + "/".join(parts)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


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
