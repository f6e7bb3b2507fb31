"""The pytest fixture `traced`: trains in a test with tracing and asserts that all went well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
        """Trace everything trained inside the `with` block, as `comgra_decl.trace` does."""
        from comgra_decl.doors.trace import trace
        from comgra_decl.query import open_run

        with trace(spec, root=self._root, group="tests", overrides=overrides) as session:
            yield session
        if session.path is not None:
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

    def assert_healthy(self, *, severity: str = "warning", ignore: Sequence[str] = ()) -> None:
        """Fail if a rule has found a problem.

        Args:
            severity: the lowest severity that fails: "error", "warning" or "hint".
            ignore: names of rules whose findings do not fail.
        """
        __tracebackhide__ = True
        order = ("error", "warning", "hint")
        if severity not in order:
            raise ValueError(f"severity must be one of {', '.join(order)}, got {severity!r}")
        serious = order[: order.index(severity) + 1]
        found = [
            finding
            for finding in self.findings()
            if finding.severity in serious and finding.rule not in ignore
        ]
        if found:
            lines = [
                f"{each.severity} {each.rule} at step {each.first_step}: {each.message}"
                for each in found[:_SHOWN]
            ]
            lines += [f"and {len(found) - _SHOWN} more"] * (len(found) > _SHOWN)
            pytest.fail("\n".join(lines), pytrace=False)

    def assert_keeps(self, contract: str | Path) -> None:
        """Fail if the run departs from a contract, and names the tensor that left it first.

        Args:
            contract: path of the contract; relative to the folder of the test.
        """
        __tracebackhide__ = True
        from comgra_decl.rules.contract import breaches, from_yaml

        path = self._contracts / contract
        found = breaches(self.run, from_yaml(path.read_text(encoding="utf-8"), where=str(path)))
        if found:
            lines = [each.message for each in found[:_SHOWN]]
            lines += [f"and {len(found) - _SHOWN} more"] * (len(found) > _SHOWN)
            pytest.fail("\n".join(lines), pytrace=False)


@pytest.fixture
def traced(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Traced:
    """Record what a test trains, for `assert_healthy` and `assert_keeps`; see `Traced`."""
    return Traced(tmp_path_factory.mktemp("comgra"), request.path.parent)
