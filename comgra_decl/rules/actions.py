"""Actions on findings: log lines, notes, notifications, and stopping the program."""

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
"""Minimum number of seconds between two log lines."""

_WAITING = 100
"""Maximum number of notifications queued for a slow URL; any further notifications are dropped."""


class Actions:
    """Takes the actions that the spec declares for findings; called on the writer thread.

    Args:
        spec: the actions to take.
        run: the run's location, for messages.
        note: adds a note to the run.
        interrupt: stops the program in a debugger, given the reason; None if unavailable.
        loud: whether findings are logged at their own level instead of DEBUG. With multiple ranks,
            only one is loud, because most problems appear on all ranks.
        clock: returns seconds; limits the log to one line per second.
    """

    def __init__(
        self,
        spec: FindingSpec,
        *,
        run: str,
        note: Callable[[Note], None],
        interrupt: Callable[[str], None] | None = None,
        loud: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._run, self._note, self._loud = spec, run, note, loud
        self._clock, self._interrupt = clock, interrupt
        self._logged = -math.inf
        self._held_back = 0
        self._messenger = None if spec.notify is None else Messenger(spec.notify)
        self._requests: list[Request] = []
        self.reason: str | None = None
        """Why the program must stop; None if it may continue."""

    def __call__(self, finding: Finding) -> None:
        """Acts on a new finding.

        The worst severity among this finding and those it explains determines the actions. A
        finding that another one explains is only logged at DEBUG level.
        """
        if finding.because is not None:
            _log.debug("comgra: %s: %s", finding.rule, finding.message)
            return
        severity, spec = finding.weight, self._spec
        if at_least(severity, spec.log):
            self._write_line(finding)
        if at_least(severity, spec.note):
            text = f"{finding.rule}{_interval(finding)}: {finding.message}"
            self._note(Note(finding.first_step, "train", time.time(), text))
        if at_least(severity, spec.keep):
            self._requests.append(Request(finding.first_step, f"finding {finding.rule}"))
        if self._messenger is not None and at_least(severity, self._messenger.severity):
            self._messenger.send({"run": self._run, **finding.to_json()})
        reason = f"{finding.rule}: {finding.message} {finding.advice}"
        if self._interrupt is not None and at_least(severity, spec.break_):
            self._interrupt(reason)
        if self.reason is None and at_least(severity, spec.stop):
            self.reason = reason

    def withdraw(self, finding: Finding, step: int) -> None:
        """Report a withdrawal wherever the finding was reported.

        Args:
            finding: the finding as it was reported.
            step: the newest step that the rules have checked.
        """
        spec = self._spec
        if at_least(finding.weight, spec.log):
            level = _LEVELS[finding.weight] if self._loud else logging.DEBUG
            _log.log(
                min(level, logging.WARNING),
                "comgra: %s is withdrawn at step %d because it no longer holds: %s",
                finding.rule,
                step,
                finding.message,
            )
        if at_least(finding.weight, spec.note):
            text = f"withdrawn: {finding.rule} no longer holds: {finding.message}"
            self._note(Note(step, "train", time.time(), text))

    def _write_line(self, finding: Finding) -> None:
        now = self._clock()
        if now - self._logged < _PAUSE and finding.weight != "error":
            self._held_back += 1
            return
        more = f" ({self._held_back} more: see `comgra-decl diagnose`)" if self._held_back else ""
        self._logged, self._held_back = now, 0
        level = _LEVELS[finding.weight] if self._loud else logging.DEBUG
        what = f"{finding.rule}{_interval(finding)}"
        _log.log(level, "comgra: %s: %s %s%s", what, finding.message, finding.advice, more)

    def requests(self) -> list[Request]:
        """Return the requests to keep steps, as received since the last call."""
        requests, self._requests = self._requests, []
        return requests

    def stop_if_due(self, *_: Any) -> None:
        """Stop the program if a finding requires it; called before an optimizer step."""
        if self.reason is not None:
            raise SystemExit(
                f"comgra: training stopped (comgra.on_finding.stop: {self._spec.stop}) because of "
                f"{self.reason}\nSee `comgra-decl diagnose {self._run}`."
            )


def _interval(finding: Finding) -> str:
    """Return the interval in which a finding began; empty if the exact step is known."""
    return "" if finding.is_exact else f" ({finding.began})"


class Messenger:
    """Sends findings to a URL, one at a time, on a separate thread."""

    def __init__(self, spec: NotifySpec) -> None:
        self._url, self._timeout = spec.url, float(spec.timeout)
        self.severity = spec.severity
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(_WAITING)
        self._complained = False
        threading.Thread(target=self._run, name="comgra-notify", daemon=True).start()

    def send(self, content: dict[str, Any]) -> None:
        """Queues a message; drops it if too many are waiting."""
        try:
            self._queue.put_nowait(content)
        except queue.Full:
            self._complain("too many findings are queued")

    def _run(self) -> None:
        while True:
            content = self._queue.get()
            try:
                self._post(json.dumps(content).encode())
            except Exception as error:  # noqa: BLE001  (nothing else reports it)
                self._complain(f"{type(error).__name__}: {error}")

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, body, headers, method="POST")
        with urllib.request.urlopen(request, timeout=self._timeout) as answer:
            answer.read(1024)

    def _complain(self, reason: str) -> None:
        if not self._complained:
            _log.warning("comgra.on_finding.notify: a finding could not be delivered (%s)", reason)
        self._complained = True
