"""Checks every request before routing, so that the check applies to all routes.

In a DNS rebinding attack, an attacker's host name resolves to this machine. The browser then treats
the attacker's page as a page from the viewer's origin, and so does Tornado, which compares Origin
with Host. Therefore, the Host of every request must be one of the viewer's own names. Numeric
addresses cannot be rebound.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from bokeh.server.util import match_host
from bokeh.settings import settings
from bokeh.util.token import get_token_payload
from tornado.httputil import (
    HTTPHeaders,
    HTTPMessageDelegate,
    HTTPServerRequest,
    ResponseStartLine,
)
from tornado.routing import Router

_LOG = logging.getLogger(__name__)

LOGIN, LOGOUT = "/login", "/logout"
_MOST_LOGGED = 20
"""Maximum number of unrecognized names to log; others are rejected without a message."""

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[a-zA-Z0-9._-]+)(?::[0-9]{0,5})?")

Authenticated = Callable[[HTTPServerRequest], bool]


@dataclass(frozen=True, slots=True)
class Names:
    """Host names for which the viewer accepts requests.

    Attributes:
        address: Listening address; "", 0.0.0.0 or :: for all addresses of the machine.
        origins: `host:port` pairs from the command line; `*` matches any part.
    """

    address: str = "127.0.0.1"
    origins: tuple[str, ...] = ()

    def know(self, host: str, local: str = "") -> bool:
        """Return whether `host`, from a request header, is a name of the viewer.

        Args:
            host: Name or address, with or without a port.
            local: This machine's address in the request's connection.
        """
        name = _name(host)
        if name is None:
            return False
        own = {"localhost", _plain(self.address.lower().rstrip(".")), local} - {""}
        return name in own or _is_loopback(name) or self.named(host)

    def named(self, host: str) -> bool:
        """Return whether `host` is named on the command line."""
        origins = (*self.origins, *(settings.allowed_ws_origin() or ()))
        return any(match_host(_full(host), _full(origin)) for origin in origins)

    def refusal(self, host: str) -> str:
        """Return the response text for a request with an unrecognized host name."""
        shown = host[:200] if _name(host) else "HOST:PORT"
        return (
            "403: the viewer does not accept this host name.\n\n"
            f"The request was for {host[:200]!r}. This is neither a name of this machine "
            "(localhost, 127.0.0.1, [::1]) nor the address on which the viewer listens. Another "
            "website may be trying to read your runs.\n\n"
            "If you reach the viewer through a proxy or from another machine, and the name is "
            "correct, start the viewer with\n\n"
            f"    --allow-websocket-origin {shown}\n"
        )


def names_of(command: Sequence[str]) -> Names:
    """Return the host names that a `panel serve` command line passes to its server."""
    parser = ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--address", default="")
    parser.add_argument("--allow-websocket-origin", action="append", default=[])
    own = list(command)[: command.index("--args")] if "--args" in command else command
    known, _ = parser.parse_known_args(own)
    return Names(known.address, tuple(known.allow_websocket_origin))


class Gate(Router):
    """Forwards allowed requests to an application and checks its response headers."""

    def __init__(
        self, application: Any, names: Names, *, authenticated: Authenticated | None = None
    ) -> None:
        """Create a gate.

        Args:
            application: The Tornado application behind it.
            names: Host names to serve.
            authenticated: Whether a request is logged in; None: no login required.
        """
        self._application = application
        self._names = names
        self._authenticated = authenticated
        self._logged: set[str] = set()

    def find_handler(self, request: HTTPServerRequest, **_options: Any) -> HTTPMessageDelegate:
        """Return the delegate that answers a request."""
        origin = request.headers.get("Origin", "")
        reader = origin if origin and self._names.named(urlsplit(origin).netloc) else ""
        reviewed: Any = _Reviewed(request.connection, secure=_is_secure(request), reader=reader)
        request.connection = reviewed
        refused = self._refused_host(request) or self._refused_origin(request)
        if refused is not None:
            return _Answer(request, 403, refused)
        known = self._authenticated is None or self._authenticated(request)
        if not known and not self._is_open(request):
            return _to_login(request, self._application.prefix)
        if self._leads_to_the_page(request):  # Bokeh would drop the query
            page = f"{self._application.prefix}/viewer?{request.query}"
            return _Answer(request, 302, f"The viewer is at {page}.\n", location=page)
        if request.host.startswith("["):  # Panel fails on a bare IPv6 host; the browser recovers
            request.host = f"localhost{request.host.partition(']')[2]}"
        if _is_garbled(request):
            return _Answer(request, 400, "400: the request was not sent by a viewer page.\n")
        if self._would_import(request):
            return _Answer(request, 404, "404: component not found.\n")
        handler: HTTPMessageDelegate = self._application.find_handler(request)
        return handler

    def _refused_host(self, request: HTTPServerRequest) -> str | None:
        hosts = request.headers.get_list("Host")
        host = hosts[0] if len(hosts) == 1 else ""
        if self._names.know(host, _local_address(request)):
            return None
        if host not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(host)
            _LOG.warning("unrecognized host name from %s: %r", request.remote_ip, host[:200])
        return self._names.refusal(host)

    def _refused_origin(self, request: HTTPServerRequest) -> str | None:
        """Rejects requests sent by pages from another origin, or embedded there as scripts."""
        script = request.path.endswith("/autoload.js")
        if request.method in ("GET", "HEAD") and not script:
            return None  # plain navigation; Bokeh checks websockets against its own list
        origin = request.headers.get("Origin")
        if origin is None:
            foreign = request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site")
        else:
            place = urlsplit(origin).netloc.lower()
            foreign = place != request.host.lower() and not self._names.named(place)
        if not foreign:
            return None
        return (
            f"403: requests from {(origin or 'another site')[:200]!r} are not accepted."
            "\n\nTo accept them, pass its host:port to --allow-websocket-origin.\n"
        )

    def _would_import(self, request: HTTPServerRequest) -> bool:
        """Return whether Panel would import a module named in the URL."""
        before, found, rest = unquote(request.path).partition("/components/")
        in_place = found and before == self._application.prefix
        return bool(in_place) and rest.partition("/")[0] not in sys.modules

    def _leads_to_the_page(self, request: HTTPServerRequest) -> bool:
        """Return whether a request is for the server's root, with a query for the page."""
        prefix = self._application.prefix
        asks = request.method in ("GET", "HEAD") and request.query
        return bool(asks) and request.path in (prefix, f"{prefix}/")

    def _is_open(self, request: HTTPServerRequest) -> bool:
        prefix = self._application.prefix
        return bool(request.path == f"{prefix}{LOGIN}")


class _Answer(HTTPMessageDelegate):
    """A short plain-text response."""

    def __init__(
        self, request: HTTPServerRequest, status: int, text: str, *, location: str = ""
    ) -> None:
        self._request = request
        self._status = status
        self._text = text.encode()
        self._location = location

    def finish(self) -> None:
        """Send the response once the request is complete."""
        headers = HTTPHeaders(
            {
                "Content-Type": "text/plain; charset=utf-8",
                "Content-Length": str(len(self._text)),
                "Connection": "close",
            }
        )
        if self._location:
            headers["Location"] = self._location
        start = ResponseStartLine("HTTP/1.1", self._status, HTTPStatus(self._status).phrase)
        connection: Any = self._request.connection
        body = b"" if self._request.method == "HEAD" else self._text
        connection.write_headers(start, headers, body)
        connection.finish()


def _is_garbled(request: HTTPServerRequest) -> bool:
    """Return whether a websocket has no session. Bokeh would accept it and fail later."""
    if request.headers.get("Upgrade", "").lower() != "websocket":
        return False
    protocol, _, token = request.headers.get("Sec-WebSocket-Protocol", "").partition(",")
    try:
        get_token_payload(token.strip())
    except Exception:  # noqa: BLE001 - malformed tokens raise various errors
        return True
    return protocol.strip() != "bokeh"


def _to_login(request: HTTPServerRequest, prefix: str) -> _Answer:
    """Redirects page requests to the login form; rejects all others."""
    pages = (prefix, f"{prefix}/", f"{prefix}/viewer")
    if request.method == "GET" and request.path == f"{prefix}{LOGOUT}":
        return _Answer(request, 302, "Log in first.\n", location=f"{prefix}{LOGIN}")
    if request.path in pages and request.method == "GET" and "Upgrade" not in request.headers:
        target = f"{prefix}{LOGIN}?next={quote(request.uri or '', safe='')}"
        return _Answer(request, 302, "Log in first.\n", location=target)
    return _Answer(request, 403, f"403: log in first, at {prefix}{LOGIN}.\n")


class _Reviewed:
    """A connection that corrects response headers."""

    def __init__(self, connection: Any, *, secure: bool, reader: str) -> None:
        self._connection = connection
        self._secure = secure
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def write_headers(
        self, start_line: ResponseStartLine, headers: HTTPHeaders, chunk: bytes | None = None
    ) -> Any:
        for name in [name for name in headers if name.startswith("Access-Control-")]:
            del headers[name]
        if self._reader:
            headers["Access-Control-Allow-Origin"] = self._reader
            headers["Access-Control-Allow-Headers"] = "*"
            headers.add("Vary", "Origin")
        headers.setdefault("X-Content-Type-Options", "nosniff")
        headers.setdefault("Referrer-Policy", "same-origin")
        cookies = headers.get_list("Set-Cookie")
        if cookies:
            del headers["Set-Cookie"]
            for cookie in cookies:
                headers.add("Set-Cookie", _guarded(cookie, self._secure))
        return self._connection.write_headers(start_line, headers, chunk)


def _guarded(cookie: str, secure: bool) -> str:
    """Return a Set-Cookie line that scripts cannot read and other sites cannot send."""
    has = {part.partition("=")[0].strip().lower() for part in cookie.split(";")[1:]}
    wanted = {"samesite": "SameSite=Lax", "httponly": "HttpOnly"}  # Strict logs out on links
    if secure:
        wanted["secure"] = "Secure"
    return "; ".join([cookie, *(text for name, text in wanted.items() if name not in has)])


def _is_secure(request: HTTPServerRequest) -> bool:
    """Return whether the browser uses TLS, even if only the proxy reports it.

    A client that forges the header only prevents its own cookies from being sent unencrypted.
    """
    forwarded = request.headers.get("X-Forwarded-Proto", "").split(",")[0].strip()
    return "https" in (request.protocol, forwarded)


def _local_address(request: HTTPServerRequest) -> str:
    stream = getattr(request.connection, "stream", None)
    sock = getattr(stream, "socket", None)
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    try:
        return _plain(sock.getsockname()[0].partition("%")[0])
    except OSError:
        return ""


def _plain(name: str) -> str:
    """Return an address in its shortest form, and a name unchanged."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name
    mapped = getattr(address, "ipv4_mapped", None)  # dual-stack sockets report IPv4 like this
    return str(mapped or address)


def _name(host: str) -> str | None:
    """Return the name or address in a Host header without the port, or None."""
    found = _HOST.fullmatch(host)
    return _plain(found[1].strip("[]").lower().rstrip(".")) if found else None


def _full(host: str) -> str:
    """Return `host:port` for matching; browsers omit default ports."""
    host = host.lower()
    if host == "*":
        return host
    if ":" not in host or host.endswith("]"):
        return f"{host}:80"
    return f"{host.removesuffix(':443')}:80" if host.endswith(":443") else host


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
