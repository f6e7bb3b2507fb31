"""The pytest fixture `traced`: trains in a test with tracing and asserts that all went well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from comgra_decl.query import Run
    from comgra_decl.record.session import Session
    from comgra_decl.rules import Finding
    from comgra_decl.spec import Spec

_SHOWN = 5


class Traced:
    """Record training in a test, in a temporary folder.

    ```python
    def test_training(traced):
        with traced("debug"):
            train()
        traced.assert_healthy()
    ```
    """

    def __init__(self, root: Path, contracts: Path) -> None:
        self._root = root
        self._contracts = contracts
        self._run: Run | None = None

    @contextmanager
    def __call__(
        self,
        spec: str | Path | Mapping[str, Any] | Spec = "debug",
        *,
        overrides: Sequence[str] = (),
    ) -> Iterator[Session]:
        """Trace everything trained inside the `with` block, as `comgra_decl.trace` does.

        If the block raises an error, the run ends with it and can be read afterwards.
        """
        from comgra_decl.doors.trace import trace
        from comgra_decl.query import open_run

        self._run = None
        tracing = trace(spec, root=self._root, group="tests", overrides=overrides)
        session: Session | None = None
        try:
            with tracing as session:
                yield session
        finally:
            if session is not None and session.path is not None:
                self._run = open_run(session.path)

    @property
    def run(self) -> Run:
        """The run that was recorded last, for reading its numbers."""
        assert self._run is not None, "nothing was traced; train inside `with traced():`"
        return self._run

    def findings(self) -> list[Finding]:
        """Return the findings of the rules about the run, most important first."""
        from comgra_decl.rules import diagnose

        return diagnose(self.run).findings

    def assert_healthy(
        self, *, severity: str = "warning", ignore: str | Iterable[str] = ()
    ) -> None:
        """Fail if a rule has found a problem, or if the rules could not look for any.

        Args:
            severity: the lowest severity that fails: "error", "warning" or "hint".
            ignore: names of rules whose findings do not fail, or one name.

        Raises:
            UnknownNameError: there is no such rule.
        """
        __tracebackhide__ = True
        from comgra_decl.errors import UnknownNameError, did_you_mean, shown
        from comgra_decl.records import SEVERITIES
        from comgra_decl.rules import diagnose
        from comgra_decl.rules.catalogue import known

        if severity not in SEVERITIES:
            raise ValueError(f"severity must be one of {', '.join(SEVERITIES)}, got {severity!r}")
        own = self.run.spec.rules
        names = {*known(), *(() if isinstance(own, str) else own)}
        ignore = [ignore] if isinstance(ignore, str) else [*ignore]
        for name in ignore:
            if name not in names:
                raise UnknownNameError(
                    f"there is no rule {shown(name)}{did_you_mean(name, names) or '.'}"
                )
        diagnosis = diagnose(self.run)
        if not diagnosis.records:
            raise AssertionError("no training step was recorded, so no rule has checked any")
        if diagnosis.incomplete:
            damage = "; ".join(diagnosis.damage)
            raise AssertionError(f"the rules could not read all records: {damage}")
        serious = SEVERITIES[: SEVERITIES.index(severity) + 1]
        _fail_with(
            f"{each.severity} {each.rule} at step {each.first_step}: {each.message}"
            for each in diagnosis.findings
            if each.severity in serious and each.rule not in ignore
        )

    def assert_keeps(self, contract: str | Path) -> None:
        """Fail if the run departs from a contract, and names the tensor that left it first.

        Args:
            contract: path of the contract; relative to the folder of the test.
        """
        __tracebackhide__ = True
        from comgra_decl.rules.contract import breaches, read

        path = self._contracts / contract
        _fail_with(each.message for each in breaches(self.run, read(path)))


def _fail_with(problems: Iterable[str]) -> None:
    """Fail the test if there are problems; show the first ones."""
    __tracebackhide__ = True
    lines = [*problems]
    if lines:
        more = [f"and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)
        raise AssertionError("\n".join([*lines[:_SHOWN], *more]))


@pytest.fixture
def traced(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Traced:
    """Record what a test trains, for `assert_healthy` and `assert_keeps`; see `Traced`."""
    return Traced(tmp_path_factory.mktemp("comgra"), request.path.parent)
