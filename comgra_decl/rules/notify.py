"""Messages about findings to webhooks, Slack, e-mail and the desktop."""

from __future__ import annotations

import json
import logging
import queue
import shutil
import smtplib
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comgra_decl.spec.rules import EmailSpec, NotifySpec

_log = logging.getLogger("comgra_decl")

_WAITING = 100
"""Maximum number of messages queued for a slow receiver; further messages are dropped."""

_PAUSE = 1.0
"""Seconds before the first retry; each further pause is twice as long."""

_REJECTED = 500
"""From this code on, a mail server's answer is final (RFC 5321, 4.2.1)."""

_TRY_AGAIN = (408, 429)
"""Client errors of HTTP that may pass."""

_Send = Callable[[dict[str, Any]], None]


class Messenger:
    """Sends findings to all places that a spec names, each on a thread of its own.

    Args:
        spec: where to send findings.
        pause: seconds before the first retry.
    """

    def __init__(self, spec: NotifySpec, *, pause: float = _PAUSE) -> None:
        self._wait = float(spec.wait)
        self.severity = spec.severity
        self._places = [
            _Place(name, send, retries=spec.retries, pause=pause)
            for name, send in self._receivers(spec, float(spec.timeout))
        ]

    def _receivers(self, spec: NotifySpec, timeout: float) -> Iterator[tuple[str, _Send]]:
        if spec.url is not None:
            yield "url", partial(_post, spec.url, timeout=timeout)
        if spec.slack is not None:
            yield "slack", partial(_to_slack, spec.slack, timeout=timeout)
        if spec.email is not None:
            yield "email", partial(_mail, spec.email, timeout=timeout)
        if spec.desktop:
            command = _desktop_command()
            if command is None:
                why = "neither notify-send nor osascript is installed"
                _log.warning("comgra.on_finding.notify.desktop: no effect, because %s", why)
            else:
                yield "desktop", partial(_show, command, timeout=timeout)

    def send(self, content: dict[str, Any]) -> None:
        """Queue a message for each place; drop it where too many are waiting."""
        for place in self._places:
            place.send(content)

    def close(self, most: float | None = None) -> None:
        """Wait until all messages are delivered, for at most `wait` seconds.

        Args:
            most: a shorter time in seconds.
        """
        wait = self._wait if most is None else min(most, self._wait)
        deadline = time.monotonic() + wait
        for place in self._places:
            place.finish()
        late = [place.name for place in self._places if not place.ended_before(deadline)]
        for name in late:
            _log.warning(
                "comgra.on_finding.notify.%s: not all findings were delivered within %g s",
                name,
                wait,
            )


class _Place:
    """Sends messages to one place, in order.

    After the place has failed repeatedly, it gets one attempt per message until one succeeds.

    Args:
        name: the key of the spec.
        send: sends a message.
        retries: how often a failed message is sent again.
        pause: seconds before the first retry.
    """

    def __init__(self, name: str, send: _Send, *, retries: int, pause: float) -> None:
        self.name = name
        self._send, self._retries, self._pause = send, retries, pause
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._complained = self._failing = False
        self._over = threading.Event()
        self._sent = self._handled = 0  # number of messages, each written by one thread
        self._thread = threading.Thread(target=self._run, name=f"comgra-notify-{name}", daemon=True)
        self._thread.start()

    def send(self, content: dict[str, Any]) -> None:
        """Queue a message; drop it if too many are waiting."""
        if self._queue.qsize() < _WAITING:
            self._queue.put(content)
            self._sent += 1
        else:
            self._complain("too many findings are queued")

    def finish(self) -> None:
        """Have the thread end after the messages that are queued."""
        self._queue.put(None)

    def ended_before(self, deadline: float) -> bool:
        """Return whether all messages were handled before a time; there are no retries after it."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._over.set()
        return self._handled == self._sent

    def _run(self) -> None:
        while (content := self._queue.get()) is not None and not self._over.is_set():
            self._deliver(content)
            self._handled += 1

    def _deliver(self, content: dict[str, Any]) -> None:
        """Send a message, with retries."""
        retries = 0 if self._failing else self._retries
        for attempt in range(retries + 1):
            try:
                self._send(content)
            except Exception as error:  # noqa: BLE001  (nothing else reports it)
                last = attempt == retries or _is_final(error)
                if last or self._over.wait(self._pause * 2**attempt):
                    self._failing = True
                    self._complain(f"{type(error).__name__}: {error}")
                    return
            else:
                self._failing = False
                return

    def _complain(self, reason: str) -> None:
        if not self._complained:
            _log.warning(
                "comgra.on_finding.notify.%s: a finding could not be delivered (%s)",
                self.name,
                reason,
            )
        self._complained = True


def _is_final(error: Exception) -> bool:
    """Return whether a receiver has rejected a message for good."""
    if isinstance(error, urllib.error.HTTPError):
        return 400 <= error.code < 500 and error.code not in _TRY_AGAIN
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return all(code >= _REJECTED for code, _ in error.recipients.values())
    if isinstance(error, smtplib.SMTPResponseException):
        return error.smtp_code >= _REJECTED
    return isinstance(error, smtplib.SMTPNotSupportedError)


def text_of(content: dict[str, Any]) -> tuple[str, str]:
    """Return a message's title and text."""
    title = f"{content['severity']}: {content['rule']} at step {content['first_step']}"
    lines = [content["message"], content["advice"]]
    lines += [f"It explains {e['rule']}: {e['message']}" for e in content.get("explains", [])]
    return title, "\n".join([*lines, f"Run: {content['run']}"])


def _post(url: str, content: dict[str, Any], *, timeout: float) -> None:
    headers = {"Content-Type": "application/json"}
    body = json.dumps(content).encode()
    request = urllib.request.Request(url, body, headers, method="POST")
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        answer.read(1024)


def _to_slack(url: str, content: dict[str, Any], *, timeout: float) -> None:
    title, text = text_of(content)
    told = f"{title}\n{text}"
    for sign, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):  # else they mark up links
        told = told.replace(sign, escaped)
    _post(url, {"text": told}, timeout=timeout)


def _mail(spec: EmailSpec, content: dict[str, Any], *, timeout: float) -> None:
    message = EmailMessage()
    title, text = text_of(content)
    message["Subject"] = " ".join(f"comgra_decl: {title}".split())
    message["From"], message["To"] = spec.from_, spec.to
    message["Date"], message["Message-ID"] = formatdate(), make_msgid()
    message.set_content(text)
    with smtplib.SMTP(spec.host, spec.port, timeout=timeout) as server:
        if spec.starttls:
            server.starttls(context=ssl.create_default_context())
        if spec.user is not None and spec.password is not None:
            server.login(spec.user, spec.password)
        server.send_message(message)


def _desktop_command() -> Callable[[str, str], list[str]] | None:
    """Return what builds the command line that shows a notification; None if there is none."""
    if found := shutil.which("notify-send"):
        return lambda title, text: [found, "--app-name=comgra_decl", "--", title, text]
    if mac := shutil.which("osascript"):
        script = "on run argv\ndisplay notification (item 2 of argv) with title (item 1 of argv)\n"
        return lambda title, text: [mac, "-e", f"{script}end run", title, text]
    return None


def _show(
    command: Callable[[str, str], list[str]], content: dict[str, Any], *, timeout: float
) -> None:
    subprocess.run(
        command(*text_of(content)),
        check=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
