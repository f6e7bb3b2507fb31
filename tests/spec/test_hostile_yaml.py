"""A spec from an untrusted run folder is rejected with little time and memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from comgra_decl.errors import SpecError
from comgra_decl.spec import load_spec
from tests.support.forked import forked

SCRIPT = """
import pathlib, resource, sys
taken = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 30), taken + (1 << 30)))
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
from comgra_decl.errors import SpecError
from comgra_decl.spec import load_spec
try:
    load_spec(sys.argv[1])
except SpecError as error:
    print(len(error.problems), str(error)[:1000])
"""


def laughs(wanted: str) -> str:
    """Forty lines, each of which expands to eight of the previous one: 8 ** 40 values."""
    lines = ["l0: &l0 [lol, lol]"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 8)}]" for i in range(1, 40)]
    return "\n".join([*lines, wanted])


HOSTILE = {
    "billion laughs": (laughs("stats: *l39"), "aliases expanded"),
    "in keys below": (laughs("nodes: {all: {select: *l39}}"), "aliases expanded"),
    "an alias of itself": ("stats: &s [mean, *s]", "contains the alias itself"),
    "deep": ("stats: " + "[" * 100_000, "nested too deep"),
    "deep with an anchor": ("a: &a 1\nstats: " + "{b: " * 50_000, "nested too deep"),
    "long": ("stats: [" + "mean, " * 300_000 + "]", "must be at most"),
    "a call": ("stats: !!python/object/apply:os.system ['touch /tmp/x']", "could not determine"),
    "no text": ("stats: \x00", "special characters"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_within_bounds(tmp_path: Path, name: str) -> None:
    text, reason = HOSTILE[name]
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    done = forked(tmp_path, "-c", SCRIPT, path)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.startswith(f"1 comgra: {path} cannot be read as YAML: ")
    assert reason in done.stdout


def test_a_spec_may_have_aliases(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        "nodes:\n  a: &a {select: 'a.*', capture: [output]}\n  b: {<<: *a, select: 'b.*'}\n"
    )
    spec = load_spec(path)
    assert spec.nodes["a"].capture == spec.nodes["b"].capture


@pytest.mark.skipif(os.name != "posix", reason="named pipes")
def test_a_named_pipe_is_no_spec(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "spec.yaml")
    with pytest.raises(SpecError, match="neither a preset"):
        load_spec(tmp_path / "spec.yaml")
