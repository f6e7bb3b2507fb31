"""Password login: constant-time comparison, rate limits, and a log of failures."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from panel.config import config
from tornado.httputil import HTTPServerRequest
from tornado.web import decode_signed_value

from comgra_decl.errors import ComgraError
from comgra_decl.viewer.panel_private import LoginHandler, LoginProvider

_LOG = logging.getLogger(__name__)
_LOGIN = Path(__file__).with_name("login.html")
_KNOWN = "comgra_known"
_MOST_CLIENTS = 10_000


@dataclass(slots=True)
class Allowance:
    """A token bucket that allows `most` immediate tries, then one per interval.

    Attributes:
        most: Size of the bucket.
        seconds: Time in seconds until another try is added.
    """

    most: int
    seconds: float
    _left: float = field(default=-1.0, init=False)
    _at: float = field(default=0.0, init=False)

    def wait(self, now: float) -> float:
        """Return the seconds until a try is available; 0 if one is available now."""
        self._fill(now)
        return 0.0 if self._left >= 1 else (1 - self._left) * self.seconds

    def take(self, now: float) -> None:
        """Use up one try."""
        self._fill(now)
        self._left = max(0.0, self._left - 1)

    def full(self, now: float) -> bool:
        """Return whether the bucket is full."""
        self._fill(now)
        return self._left >= self.most

    def _fill(self, now: float) -> None:
        if self._left < 0:
            self._left = float(self.most)
        else:
            self._left = min(self.most, self._left + max(0.0, now - self._at) / self.seconds)
        self._at = now


class Throttle:
    """Limits wrong guesses, per client and in total.

    No client is locked out permanently: each can try again after some seconds. Browsers that have
    logged in before have a separate limit, so that other clients' wrong guesses cannot lock them
    out.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._clients: dict[str, Allowance] = {}
        self._all = Allowance(most=50, seconds=1.0)

    def wait(self, client: str, *, known: bool = False) -> float:
        """Return the seconds that a client must wait before its next attempt; 0 if none."""
        now = self._clock()
        own = self._clients.get(client)
        waits = [own.wait(now)] if own else [0.0]
        if not known:
            waits.append(self._all.wait(now))
        return max(waits)

    def failed(self, client: str, *, known: bool = False) -> None:
        """Count a wrong guess."""
        now = self._clock()
        if client not in self._clients and len(self._clients) >= _MOST_CLIENTS:
            self._forget(now)
        self._clients.setdefault(client, Allowance(most=5, seconds=10.0)).take(now)
        if not known:
            self._all.take(now)

    def _forget(self, now: float) -> None:
        """Remove clients that have regained all attempts, or else the oldest clients."""
        kept = {name: own for name, own in self._clients.items() if not own.full(now)}
        while len(kept) >= _MOST_CLIENTS:
            del kept[next(iter(kept))]
        self._clients = kept


class Passwords:
    """Accepted passwords: one password for everyone, or a file that is read at each login."""

    def __init__(self, given: str) -> None:
        """Store a password or the path of a JSON file.

        Raises:
            ComgraError: The file is missing or malformed.
        """
        self._file = Path(given) if Path(given).is_file() else None
        self._word = given
        if self._file is None and given.endswith(".json"):
            raise ComgraError(
                f"--basic-auth: file not found: {given}; give a JSON file like "
                '{"name": "password"}, or a password that does not end with .json'
            )
        self._users()

    def right(self, user: str, password: str) -> bool:
        """Return whether a password is correct; the time taken does not depend on the guess."""
        users = self._users()
        expected = self._word if users is None else users.get(user)
        same = hmac.compare_digest(_digest(password), _digest(expected or ""))
        return same and bool(expected)

    def _users(self) -> Mapping[str, str] | None:
        if self._file is None:
            return None
        try:
            users = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ComgraError(f"--basic-auth: cannot read {self._file}: {error}") from None
        texts = isinstance(users, dict) and all(isinstance(word, str) for word in users.values())
        if not texts or not users:
            raise ComgraError(
                f'--basic-auth: {self._file} must have the form {{"name": "password"}}'
            )
        return {str(name): str(word) for name, word in users.items()}


class Login(LoginProvider):
    """Asks for a password and sets a signed cookie on success."""

    def __init__(self, given: str) -> None:
        self._passwords = Passwords(given)
        self._throttle = Throttle()
        self._secret = secrets.token_urlsafe(32)
        # Panel's template loads images from a CDN. Last, because it builds the login form.
        super().__init__(login_template=str(_LOGIN))  # type: ignore[no-untyped-call]

    @property
    def options(self) -> dict[str, Any]:
        """Options for Panel's server."""
        return {"auth_provider": self, "cookie_secret": self._secret}

    @property
    def login_handler(self) -> type[LoginHandler]:
        """Handle the login form."""
        return self.handler(_Form, passwords=self._passwords, throttle=self._throttle)

    def has_passed(self, request: HTTPServerRequest) -> bool:
        """Return whether a request is logged in."""
        cookie = request.cookies.get("user")
        if cookie is None:
            return False
        days = config.oauth_expiry
        return bool(decode_signed_value(self._secret, "user", cookie.value, max_age_days=days))


class _Form(LoginHandler):
    passwords: Passwords
    throttle: Throttle

    def post(self) -> None:
        user = self.get_argument("username", "")
        cookie = self.get_signed_cookie(_KNOWN)
        client = f"browser {cookie.decode()}" if cookie else _network(self.request.remote_ip or "")
        known = cookie is not None
        wait = math.ceil(self.throttle.wait(client, known=known))
        if wait:
            self.set_header("Retry-After", str(wait))
            seconds = "second" if wait == 1 else "seconds"
            self._answer(429, f"Too many wrong passwords. Try again in {wait} {seconds}.")
            return
        try:
            right = self.passwords.right(user, self.get_argument("password", "", strip=False))
        except ComgraError as error:
            _LOG.error("%s", error)
            self._answer(500, "Cannot read the password file; see the server's log.")
            return
        if not right:
            self.throttle.failed(client, known=known)
            # Omit the name: users sometimes type their password there.
            _LOG.warning("wrong password from %s", self.request.remote_ip)
            self._answer(200, "Wrong name or password.")
            return
        name = cookie or secrets.token_urlsafe(16)
        self.set_signed_cookie(_KNOWN, name, path=config.cookie_path)
        self.log_in()

    def set_current_user(self, user: str) -> None:
        # Panel drops the login if the name is empty.
        super().set_current_user(user or "reader")  # type: ignore[no-untyped-call]

    def _answer(self, status: int, text: str) -> None:
        self.set_status(status)
        self.show_form(text)


def _network(address: str) -> str:
    """Return the rate limiter's key for an address. An IPv6 client owns a whole /64 network."""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    except ValueError:
        return address


def _digest(text: str) -> bytes:
    return sha256(text.encode("utf-8", "surrogatepass")).digest()
