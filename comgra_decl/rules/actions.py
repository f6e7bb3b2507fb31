"""Actions on findings: log lines, notes, notifications, and stopping the program."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from comgra_decl.keep import Request
from comgra_decl.records import Note
from comgra_decl.rules.finding import Finding, at_least
from comgra_decl.rules.notify import Messenger

if TYPE_CHECKING:
    from comgra_decl.spec.rules import FindingSpec

_log = logging.getLogger("comgra_decl")

_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "hint": logging.INFO}
_PAUSE = 1.0
"""Minimum number of seconds between two log lines."""


class Actions:
    """Takes the actions that the spec declares for findings; called on the writer thread.

    Args:
        spec: the actions to take.
        run: the run's location, for messages.
        note: adds a note to the run.
        raises: returns the exception class with which the program is stopped.
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
        raises: Callable[[], type[BaseException]] = lambda: SystemExit,
        interrupt: Callable[[str], None] | None = None,
        loud: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._run, self._note, self._loud = spec, run, note, loud
        self._clock, self._interrupt, self._raises = clock, interrupt, raises
        self._logged = -math.inf
        self._held_back = 0
        self._messenger = None if spec.notify is None else Messenger(spec.notify)
        self._requests: list[Request] = []
        self.reason: str | None = None
        """Why the program must stop; None if it may continue."""
        self.raised: BaseException | None = None
        """The exception with which the program was stopped last."""

    def __call__(self, finding: Finding, explains: Sequence[Finding] = ()) -> None:
        """Act on a new finding.

        The worst severity among this finding and those it explains determines the actions. A
        finding that another one explains is only logged at DEBUG level; a message about its cause
        names it.

        Args:
            finding: the finding.
            explains: the findings that it explains.
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
            self._messenger.send(_message(self._run, finding, explains))
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

    def close(self, most: float | None = None) -> None:
        """Wait for messages that have not been delivered, for at most the time in the spec.

        Args:
            most: a shorter time in seconds.
        """
        if self._messenger is not None:
            self._messenger.close(most)

    def requests(self) -> list[Request]:
        """Return the requests to keep steps, as received since the last call."""
        requests, self._requests = self._requests, []
        return requests

    def stop_if_due(self, *_: Any) -> None:
        """Stop the program if a finding requires it; called before an optimizer step."""
        if self.reason is not None:
            self.raised = self._raises()(
                f"comgra: training stopped (comgra.on_finding.stop: {self._spec.stop}) because of "
                f"{self.reason}\nSee `comgra-decl diagnose {self._run}`."
            )
            raise self.raised


def _interval(finding: Finding) -> str:
    """Return the interval in which a finding began; empty if the exact step is known."""
    return "" if finding.is_exact else f" ({finding.began})"


def _message(run: str, finding: Finding, explains: Sequence[Finding]) -> dict[str, Any]:
    """Return a finding with those that it explains, as JSON data."""
    keys = ("rule", "severity", "first_step", "message")
    listed = [{key: getattr(each, key) for key in keys} for each in explains]
    return {"run": run, **finding.to_json(), "explains": listed}
