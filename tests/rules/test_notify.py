"""Findings reach webhooks, Slack, e-mail and the desktop, and are sent again after failures."""

from __future__ import annotations

import email
import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from comgra_decl.errors import SpecError
from comgra_decl.rules import Finding, Place
from comgra_decl.rules.actions import Actions
from comgra_decl.rules.notify import Messenger
from comgra_decl.spec import load_spec
from comgra_decl.spec.rules import FindingSpec, NotifySpec

FOUND = Finding(
    rule="dead_units",
    severity="warning",
    first_step=30,
    last_step=40,
    message="<0> is dead.",
    advice="Revive it.",
    place=Place("0"),
)
CONTENT = json.loads(json.dumps({"run": "r", **FOUND.to_json(), "explains": []}))


@contextmanager
def web(*codes: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the URL of a server that answers with these codes, then 200, and what it received."""
    got: list[dict[str, Any]] = []
    answers = [*codes]

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answers.pop(0) if answers else 200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with serving(HTTPServer(("127.0.0.1", 0), Listener)) as port:
        yield f"http://127.0.0.1:{port}/x", got


@contextmanager
def serving(server: socketserver.TCPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def mail(*answers: bytes) -> Iterator[tuple[int, list[str]]]:
    """Yield the port of an SMTP server, and the messages that it received.

    It answers the first messages as given, and accepts all others.
    """
    got: list[str] = []
    left = [*answers]

    class Session(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            while line := self.rfile.readline():
                if line.upper().startswith(b"DATA"):
                    self.wfile.write(b"354 go on\r\n")
                    lines: list[bytes] = []
                    while (line := self.rfile.readline()) != b".\r\n":
                        lines.append(line)
                    got.append(b"".join(lines).decode())
                    if left:
                        self.wfile.write(left.pop(0) + b"\r\n")
                        continue
                self.wfile.write(
                    b"221 bye\r\n" if line.upper().startswith(b"QUIT") else b"250 ok\r\n"
                )

    with serving(socketserver.TCPServer(("127.0.0.1", 0), Session)) as port:
        yield port, got


def sent(spec: NotifySpec, *contents: dict[str, Any]) -> Messenger:
    messenger = Messenger(spec, pause=0.001)
    for content in contents or (CONTENT,):
        messenger.send(content)
    messenger.close()
    return messenger


def test_a_message_is_sent_again_until_it_arrives(caplog: pytest.LogCaptureFixture) -> None:
    with web(500, 503) as (url, got):
        sent(NotifySpec(url=url))
    assert got == [CONTENT] * 3
    assert not caplog.records


def test_retries_are_limited_and_a_failing_place_gets_one_attempt_per_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with web(*[500] * 5) as (url, got):
        sent(NotifySpec(url=url), *[{**CONTENT, "step": i} for i in range(3)])
    assert [each["step"] for each in got] == [0, 0, 0, 0, 1, 2]
    (record,) = caplog.records
    assert "comgra.on_finding.notify.url: a finding could not be delivered" in record.getMessage()


def test_what_is_rejected_is_not_sent_again() -> None:
    with web(404) as (url, got):
        sent(NotifySpec(url=url))
    assert len(got) == 1


@pytest.mark.parametrize("answer", [b"550 no such user", b"535 who are you"])
def test_a_mail_that_is_rejected_is_not_sent_again_and_one_that_is_put_off_is(
    answer: bytes,
) -> None:
    for first, tries in ((answer, 1), (b"451 try again", 2)):
        with mail(first) as (port, got):
            place = {"host": "127.0.0.1", "port": port, "to": "a@b.c", "starttls": False}
            sent(NotifySpec.model_validate({"email": place}))
        assert len(got) == tries
        assert "\nDate: " in got[0]


def test_the_end_waits_no_longer_than_stated(caplog: pytest.LogCaptureFixture) -> None:
    with web(*[500] * 9) as (url, _):
        messenger = Messenger(NotifySpec(url=url, wait=0), pause=600)
        messenger.send(CONTENT)
        messenger.close()  # else the test would take ten minutes
    assert "not all findings were delivered within 0 s" in caplog.text


def test_a_place_that_hangs_delays_no_other(caplog: pytest.LogCaptureFixture) -> None:
    released, arrived = threading.Event(), threading.Event()

    class Hanging(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            assert released.wait(60)

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            arrived.set()

        def log_message(self, *_: Any) -> None:
            pass

    with (
        serving(socketserver.TCPServer(("127.0.0.1", 0), Hanging)) as hanging,
        serving(HTTPServer(("127.0.0.1", 0), Listener)) as well,
    ):
        url, slack = (f"http://127.0.0.1:{port}" for port in (hanging, well))
        messenger = Messenger(NotifySpec(url=url, slack=slack, timeout=60), pause=0.001)
        messenger.send(CONTENT)
        assert arrived.wait(60)
        messenger.close(most=0.0)
        released.set()
    said = [record.getMessage() for record in caplog.records if "within" in record.getMessage()]
    assert said[0].startswith("comgra.on_finding.notify.url: not all findings were delivered")


def test_slack_gets_a_text_without_markup() -> None:
    with web() as (url, got):
        sent(NotifySpec(slack=url))
    (message,) = got
    assert [*message] == ["text"]
    for part in ("warning: dead_units at step 30", "&lt;0&gt; is dead.", "Revive it.", "Run: r"):
        assert part in message["text"]


def test_an_email_arrives() -> None:
    with mail() as (port, got):
        place = {"host": "127.0.0.1", "port": port, "to": "a@b.c", "starttls": False}
        sent(NotifySpec.model_validate({"email": place}))
    message = email.message_from_string(got[0])
    assert message["To"] == "a@b.c"
    assert message["Subject"] == "comgra_decl: warning: dead_units at step 30"
    assert "<0> is dead." in str(message.get_payload())


def test_the_desktop_shows_a_notification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program, shown = tmp_path / "notify-send", tmp_path / "shown"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {shown}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    sent(NotifySpec(desktop=True))
    assert shown.read_text().splitlines()[2:4] == ["warning: dead_units at step 30", "<0> is dead."]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    sent(NotifySpec(desktop=True))
    assert "neither notify-send nor osascript is installed" in caplog.text


def test_a_cause_is_sent_with_what_it_explains() -> None:
    effect = replace(FOUND, rule="flat", severity="error", because="dead_units", message="Flat.")
    with web() as (url, got):
        spec = FindingSpec(log="never", notify=NotifySpec(url=url, severity="error"))
        actions = Actions(spec, run="r", note=lambda _: None)
        actions(replace(FOUND, outcome="error"), [effect])
        actions(effect)
        actions.close()
    (message,) = got
    assert message["rule"] == "dead_units"
    flat = {"rule": "flat", "severity": "error", "first_step": 30, "message": "Flat."}
    assert message["explains"] == [flat]


def test_a_place_is_required() -> None:
    with pytest.raises(SpecError, match="at least one of url, slack, email and desktop"):
        load_spec({"on_finding": {"notify": {"severity": "error"}}})
