"""What happens when a rule has found something: a line in the log, a note, an end, a message."""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from comgra_decl.keep import Request
from comgra_decl.records import Note
from comgra_decl.rules.finding import Finding, at_least

if TYPE_CHECKING:
    from comgra_decl.spec.rules import FindingSpec, NotifySpec

_log = logging.getLogger("comgra_decl")

_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "hint": logging.INFO}
_PAUSE = 1.0
"""Least seconds between two lines in the log."""

_WAITING = 100
"""So many messages wait for an address that is slow; more are dropped."""


class Actions:
    """Does with findings what the spec says; called on the writer thread.

    Args:
        spec: what to do.
        run: where the run is, for messages.
        note: takes a note of the run.
        loud: whether findings are logged as what they are; else as details. Of several ranks one
            is loud: what goes wrong in one goes wrong in all.
        clock: returns seconds; limits the log to one line per second.
    """

    def __init__(
        self,
        spec: FindingSpec,
        *,
        run: str,
        note: Callable[[Note], None],
        loud: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._run, self._note, self._loud = spec, run, note, loud
        self._clock = clock
        self._logged = -math.inf
        self._held_back = 0
        self._messenger = None if spec.notify is None else Messenger(spec.notify)
        self._requests: list[Request] = []
        self.reason: str | None = None
        """Why the program is to end, if it is."""

    def __call__(self, finding: Finding) -> None:
        """Acts upon a new finding; what another one explains is only logged as a detail."""
        if finding.because is not None:
            _log.debug("comgra: %s: %s", finding.rule, finding.message)
            return
        severity, spec = finding.severity, self._spec
        if at_least(severity, spec.log):
            self._write_line(finding)
        if at_least(severity, spec.note):
            text = f"{finding.rule}: {finding.message}"
            self._note(Note(finding.first_step, "train", time.time(), text))
        if at_least(severity, spec.keep):
            self._requests.append(Request(finding.first_step, f"finding {finding.rule}"))
        if self._messenger is not None and at_least(severity, self._messenger.severity):
            self._messenger.send({"run": self._run, **finding.to_json()})
        if self.reason is None and at_least(severity, spec.stop):
            self.reason = f"{finding.rule}: {finding.message} {finding.advice}"

    def _write_line(self, finding: Finding) -> None:
        now = self._clock()
        if now - self._logged < _PAUSE and finding.severity != "error":
            self._held_back += 1
            return
        more = f" ({self._held_back} more: see `comgra-decl diagnose`)" if self._held_back else ""
        self._logged, self._held_back = now, 0
        level = _LEVELS[finding.severity] if self._loud else logging.DEBUG
        _log.log(level, "comgra: %s: %s %s%s", finding.rule, finding.message, finding.advice, more)

    def requests(self) -> list[Request]:
        """Returns what findings since the last time want to be kept."""
        requests, self._requests = self._requests, []
        return requests

    def end_if_told(self, *_: Any) -> None:
        """Ends the program if a finding says so; called before an optimizer's step."""
        if self.reason is not None:
            raise SystemExit(
                f"comgra: the training is ended (comgra.on_finding.stop: {self._spec.stop}), "
                f"because of {self.reason}\nSee `comgra-decl diagnose {self._run}`."
            )


class Messenger:
    """Sends findings to an address, one after the other, on a thread of its own."""

    def __init__(self, spec: NotifySpec) -> None:
        self._url, self._timeout = spec.url, float(spec.timeout)
        self.severity = spec.severity
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(_WAITING)
        self._complained = False
        threading.Thread(target=self._run, name="comgra-notify", daemon=True).start()

    def send(self, content: dict[str, Any]) -> None:
        """Hands over what to send; it is dropped when too much waits."""
        try:
            self._queue.put_nowait(content)
        except queue.Full:
            self._complain("too many findings wait for it")

    def _run(self) -> None:
        while True:
            content = self._queue.get()
            try:
                self._post(json.dumps(content).encode())
            except Exception as error:  # noqa: BLE001  (nobody else hears of it)
                self._complain(f"{type(error).__name__}: {error}")

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, body, headers, method="POST")
        with urllib.request.urlopen(request, timeout=self._timeout) as answer:
            answer.read(1024)

    def _complain(self, reason: str) -> None:
        if not self._complained:
            _log.warning("comgra.on_finding.notify: a finding could not be sent (%s)", reason)
        self._complained = True
