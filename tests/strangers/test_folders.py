"""Untrusted folders, read in every way: nothing runs, hangs or takes all memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import comgra_decl as comgra
from comgra_decl.query import Run
from comgra_decl.rules import diagnose, stored
from tests.store.test_damage import change_json
from tests.strangers.folders import ATTACKS, TARGET, made, make_run, read
from tests.strangers.reading_folders import of_run
from tests.support.forked import forked

MEMORY_MB = 1500
"""Maximum resident memory of all reads of one folder, imports included."""

SHORT = [
    "code wherever the spec takes it",
    "a pipe as a data file",
]
PAYLOAD = "open({!r}, 'w').close()\nimport comgra_decl.rules as r\nclass ran(r.SlotRule): pass\n"


COMMAND = "from comgra_decl.cli.main import main; main()"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("good"))


def looked(runs: Sequence[Path], folder: Path, *options: str) -> list[dict[str, Any]]:
    """Reads runs in a separate process, in which the names in a spec can be imported."""
    payload = folder / f"{TARGET.partition('.')[0]}.py"
    payload.write_text(PAYLOAD.format(str(folder / "it ran")))
    command = ["-m", "tests.strangers.reading_folders", folder / "out", *runs, *options]
    done = forked(folder, *command, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not (folder / "it ran").exists(), "code that a run names was executed"
    return [json.loads(line) for line in done.stdout.splitlines()]


def wrong(told: dict[str, Any]) -> list[str]:
    """Returns everything that must not have happened."""
    found = [f"{look}: {end}" for look, end in told["looks"].items() if end.startswith("!")]
    if told["code"]:
        found.append(f"ended with {told['code']} after {told.get('after')}: {told['stderr']}")
    if told["rss_mb"] > MEMORY_MB:
        found.append(f"took {told['rss_mb']} MB")
    module = TARGET.partition(".")[0]
    odd = [e for e in told["events"] if module in e or not e.startswith(("import ", "exec "))]
    return found + odd


def assert_harmless(attacks: Sequence[str], good: Path, folder: Path) -> None:
    runs = [made(good, attack, folder) for attack in attacks]
    found = looked(runs, folder)
    assert len(found) == len(attacks)
    bad = {attack: wrong(told) for attack, told in zip(attacks, found, strict=True)}
    assert not {attack: what for attack, what in bad.items() if what}


@pytest.mark.slow
def test_folders_of_strangers_run_hang_and_exhaust_nothing(good: Path, tmp_path: Path) -> None:
    assert_harmless(SHORT, good, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_all_folders_of_strangers_run_hang_and_exhaust_nothing(
    good: Path, tmp_path: Path, part: int
) -> None:
    assert_harmless([*ATTACKS][part::6], good, tmp_path)


@pytest.mark.slow
def test_a_good_run_gives_an_answer_to_every_look(good: Path, tmp_path: Path) -> None:
    (told,) = looked([good], tmp_path)
    assert wrong(told) == []
    assert {look: end for look, end in told["looks"].items() if end} == {}


def test_every_public_name_of_a_run_is_looked_at(good: Path) -> None:
    names = {name for name in dir(Run) if not name.startswith("_")}
    assert names <= set(of_run(comgra.open_run(good)))


def test_a_rule_that_a_run_names_is_unchecked_unless_it_is_trusted(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(good, "rules that name code", tmp_path)
    (tmp_path / "strangers_payload.py").write_text(
        "from comgra_decl.rules.gradients.vanishing import VanishingGradient as ran\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = read(run, "meta/run.json")["spec"]
    change_json(run, "meta/run.json", spec={**spec, "rules": {"mine": {"_target_": TARGET}}})
    opened = comgra.open_run(run)
    reasons = {entry.rule: entry.reason for entry in diagnose(opened).unchecked}
    assert "was not imported" in reasons["mine"]
    assert "--trust" in reasons["mine"]
    assert "strangers_payload" not in sys.modules
    known = stored(opened)
    assert known is not None
    assert "mine" in known.checked  # it ran while the run was recorded, as its author requested
    assert "strangers_payload" not in sys.modules
    trusted = diagnose(opened, trust=True)
    assert "mine" in trusted.checked
    assert "mine" not in {entry.rule for entry in trusted.unchecked}


@pytest.mark.parametrize(("option", "imported"), [([], False), (["--trust"], True)])
def test_the_command_imports_only_what_it_is_told_to_trust(
    good: Path, tmp_path: Path, option: list[str], imported: bool
) -> None:
    run = made(good, "rules that name code", tmp_path)
    spec = read(run, "meta/run.json")["spec"]
    change_json(run, "meta/run.json", spec={**spec, "rules": {"mine": {"_target_": TARGET}}})
    (tmp_path / "strangers_payload.py").write_text(
        f"open({str(tmp_path / 'it ran')!r}, 'w').close()\n"
        "from comgra_decl.rules.gradients.vanishing import VanishingGradient as ran\n"
    )
    done = forked(tmp_path, "-c", COMMAND, "diagnose", run, "--no-together", *option)
    assert done.returncode in (0, 3), done.stderr
    assert (tmp_path / "it ran").exists() == imported
    assert ("was not imported" in " ".join(done.stdout.split())) != imported
