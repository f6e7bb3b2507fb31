"""Programs in many styles, with the `debug` preset: what is wrong is named, and nothing else.

See `further_programs.py`. Each one is a process of its own, and nothing is set faster for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import comgra_decl as comgra
from comgra_decl.hooks.graph import telling
from tests.record import further_programs as programs
from tests.record.test_around import AROUND
from tests.record.test_ordinary_programs import found, traced

FILE = Path(programs.__file__)
FILLING = ("stream", "cached", "replay", "trainer")
"""Healthy programs whose memory grows at first; they run for as long as a leak needs to be told."""

TRUE_OF = {"stream": "input_bound", "triplets": "input_bound", "replay": "growing_memory"}
"""Findings that are right in healthy programs: on a busy machine, two workers with single samples
are slow; hard negatives are looked for before the model is called; and nothing tells a buffer that
fills up from a leak until it is full."""

Program = Callable[[float], None]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("program", programs.HEALTHY, ids=lambda each: each.__name__)
def test_a_healthy_program_gets_no_finding_about_what_is_around_the_network(
    program: Program, tmp_path: Path
) -> None:
    name = program.__name__
    run = traced(name, 45 if name in FILLING else 20, tmp_path, file=FILE)
    assert run.steps[-1] >= 5
    assert run.state == "finished"
    assert run.ending is None
    table = run.findings()
    around = table[table["rule"].isin(AROUND - {TRUE_OF.get(name)})]
    assert around.empty, around["message"].to_list()


@pytest.mark.parametrize(
    ("program", "holder"),
    [
        (programs.leak_sum, r"operations in the graph of validation in leak_sum "),
        (programs.leak_memo, r"MEMO\.known|self\.known in Memo|Memo\.known"),
        (programs.leak_hook, r"seen in leak_hook "),
        (programs.leak_arrays, r"(predictions|targets) in leak_arrays "),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_leak_is_named_with_what_holds_it(program: Program, holder: str, tmp_path: Path) -> None:
    """`leak_bank` is left out: it grows too slowly to be told in a minute."""
    run = traced(program.__name__, 60, tmp_path, file=FILE)
    message = found(run, "growing_memory")["message"]
    assert re.search(holder, message), message


@pytest.mark.parametrize("program", programs.STARVED, ids=lambda each: each.__name__)
def test_a_model_that_waits_for_its_data_is_named(program: Program, tmp_path: Path) -> None:
    message = found(traced(program.__name__, 20, tmp_path, file=FILE), "input_bound")["message"]
    assert "pass before the model is called" in message


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (programs.copy_check, "if torch.isnan(y).any():"),
        (programs.copy_table, "index.cpu()"),
        (programs.copy_scale, "x.abs().max().item()"),
        (programs.copy_sizes, "sizes.tolist()"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_wait_for_the_device_is_named_with_its_line(
    program: Program, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a CUDA device, the host stands in for it."""
    monkeypatch.setattr(telling, "_HOSTS", ())
    with comgra.trace("debug", root=tmp_path) as session:
        program(2.0)
    assert session.path is not None
    message = found(comgra.open_run(session.path), "synchronising_call")["message"]
    numbers = [1 + n for n, text in enumerate(FILE.read_text().splitlines()) if line in text]
    assert f"{FILE.name}:{numbers[0]})" in message


@pytest.mark.parametrize("program", programs.COPIES, ids=lambda each: each.__name__)
def test_on_the_host_nobody_waits_for_a_device(program: Program, tmp_path: Path) -> None:
    with comgra.trace("debug", root=tmp_path) as session:
        program(2.0)
    assert session.path is not None
    assert "synchronising_call" not in set(comgra.open_run(session.path).findings()["rule"])


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (programs.hang_stopped, r"worker \d, process \d+: stopped"),
        (programs.hang_heavy, r"worker \d, process \d+: running"),
        (programs.hang_lock, r"worker 0, process \d+: sleeping"),
        (programs.hang_thread, r"prefetch:(.|\n)*in download"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_hangs_is_named_with_its_state(program: Program, told: str, tmp_path: Path) -> None:
    run = traced(program.__name__, 25, tmp_path, file=FILE)
    assert "had not ended after" in found(run, "stalled_step")["message"]
    texts = run.notes()["text"]
    (note,) = texts[texts.str.contains("has not ended")]
    assert re.search(told, note), note
