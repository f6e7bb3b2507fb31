"""Which rules check a run, and what happens when one of them reports a finding.

Only the form is checked here. Names and parameters are checked by `comgra_decl.rules` before a run
is recorded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from comgra_decl.spec.base import Bool, Int, Number, SpecModel
from comgra_decl.spec.keep import checked_target

Limit = Literal["error", "warning", "hint", "never"]
"""The lowest severity of findings that triggers an action."""


def _switched(value: Any) -> Any:
    """Convert booleans back to `off` and `on`, which YAML reads as booleans."""
    return {False: "off", True: "default"}.get(value, value) if isinstance(value, bool) else value


def _entries(value: Any) -> Any:
    """Return the entries of a mapping in their long form."""
    value = _switched(value)
    if value is None:
        return "off"
    if not isinstance(value, Mapping):
        return value
    return {name: _entry(entry) for name, entry in value.items()}


def _entry(value: Any) -> Any:
    if value is None:
        return "off"
    value = _switched(value)
    if value == "default":
        return {}
    return {"when": value} if isinstance(value, str) and value != "off" else value


RuleEntry = Literal["off"] | dict[str, Any]
"""Settings of one rule."""

Rules = Annotated[
    Literal["default", "off"] | dict[str, RuleEntry],
    BeforeValidator(_entries),
]
"""All rules with their defaults, no rules, or a mapping from rule name to changed settings."""


Address = Annotated[str, Field(pattern=r"^(https?://|\$\{)")]
"""A URL, or the expression that a stored spec has in its place."""

_Text = Annotated[str, Field(min_length=1)]


_TOKEN = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w.+=-]{16,}")
"""A long word of letters and digits."""

_NOT_SAVED = "(not saved)"
"""What a stored spec contains in place of a path."""


def secret_in(url: str, *, webhook: bool) -> str | None:
    """Return which part of a URL gives access to whoever knows it; None if there is none.

    Nobody else can use a URL of this machine itself (`localhost` and loopback addresses).

    Args:
        url: the URL.
        webhook: whether any path gives access, as for Slack's incoming webhooks.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    with suppress(ValueError):  # a name
        if ip_address(host).is_loopback:
            return None
    if host == "localhost" or host.endswith(".localhost"):
        return None
    if parts.username or parts.password:
        return "a URL with a login"
    if parts.query:
        return "a URL with a query"
    words = [word for word in unquote(parts.path).split("/") if word not in ("", _NOT_SAVED)]
    if (webhook and words) or any(_TOKEN.fullmatch(word) for word in words):
        return "a URL with a token in its path"
    return None


class EmailSpec(SpecModel):
    """Sends e-mails by SMTP."""

    host: _Text
    """Name of the SMTP server."""

    port: Annotated[Int, Field(ge=1, le=65535)] = 587
    """Port of the SMTP server."""

    to: _Text
    """Recipient; several are separated by commas."""

    from_: _Text = Field(default="comgra_decl@localhost", alias="from")
    """Sender."""

    starttls: Bool = True
    """Whether to encrypt the connection with STARTTLS. With a password, the server's certificate
    must be valid."""

    user: str | None = None
    """User name for the login; null for no login."""

    password: str | None = None
    """Password for the login. Only an environment expression is accepted, such as
    `${oc.env:SMTP_PASSWORD}`. The password is never stored."""

    @model_validator(mode="after")
    def _login_is_complete(self) -> EmailSpec:
        if (self.user is None) != (self.password is None):
            raise ValueError("user and password must be given together")
        if self.password is not None and not self.starttls:
            raise ValueError("a password requires `starttls: true`, which encrypts it")
        return self


class NotifySpec(SpecModel):
    """Sends findings to other places, from a separate thread.

    A message contains the cause of a problem and names the findings that it explains, which are not
    sent separately. Several places may be combined.
    """

    url: Address | None = None
    """A URL that receives each finding as JSON in a POST request. The run stores the server, but
    neither path, query nor login; of `${oc.env:NAME}`, only the expression. A URL with a login, a
    query or a token in its path must be such an expression, unless its host is this machine."""

    slack: Address | None = None
    """The URL of an incoming webhook of Slack, or of a service that accepts the same JSON:
    `{"text": ...}`. Stored like `url`. Any path counts as a token."""

    email: EmailSpec | None = None
    """E-mails; null for none."""

    desktop: Bool = False
    """Whether to show a notification on the desktop, with `notify-send` (Linux) or `osascript`
    (macOS). Without either, a warning is logged."""

    severity: Limit = "warning"
    """Lowest severity of the findings to send."""

    timeout: Annotated[Number, Field(gt=0, le=60)] = 5.0
    """Timeout of each attempt in seconds."""

    retries: Annotated[Int, Field(ge=0, le=10)] = 3
    """How often a failed message is sent again: after 1, 2, 4, ... seconds. Messages that the
    receiver rejects (HTTP 4xx other than 408 and 429) are not sent again."""

    wait: Annotated[Number, Field(ge=0, le=600)] = 15.0
    """Maximum time in seconds that the end of the run waits for messages that have not been
    delivered."""

    @model_validator(mode="after")
    def _has_a_receiver(self) -> NotifySpec:
        if not (self.url or self.slack or self.email or self.desktop):
            raise ValueError("needs at least one of url, slack, email and desktop")
        return self


class ExceptionSpec(SpecModel):
    """An exception class of the program or of a package."""

    target: Annotated[str, AfterValidator(checked_target)] = Field(alias="_target_")
    """The class: package.module.class. It is called with a message."""


class FindingSpec(SpecModel):
    """Actions to take on findings, each with the lowest severity that triggers it.

    Every finding is also stored with the run.
    """

    log: Limit = "warning"
    """Write one line per finding to the program's log, at most one per second."""

    note: Limit = "warning"
    """Add a note to the run, at the step of the finding."""

    keep: Limit = "never"
    """Keep the step at which the finding began, the `keep.ring` steps before it, and the
    `keep.after` steps after it, if they are still buffered. Requires `keep`, which buffers
    steps."""

    stop: Limit = "never"
    """End the program at its next optimizer step, with the finding as the reason."""

    raises: ExceptionSpec | None = None
    """What `stop` raises, as in {_target_: optuna.TrialPruned}; null: SystemExit, which ends the
    program. A sweep goes on with its next job if it handles the exception."""

    break_: Limit = Field(default="never", alias="break")
    """Stop in pdb at the next module call. This happens only once, and standard input must be a
    terminal."""

    notify: NotifySpec | None = None
    """Send the finding to a webhook, Slack, e-mail or the desktop; null for none."""

    @model_validator(mode="after")
    def _raises_if_it_stops(self) -> FindingSpec:
        if self.raises is not None and self.stop == "never":
            raise ValueError("raises has no effect without stop; add stop: error")
        return self
