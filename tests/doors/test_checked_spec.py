"""Everything that is wrong with a declaration is reported at once, before training starts."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import comgra_decl as comgra
from comgra_decl.doors.script import main
from comgra_decl.errors import SpecError
from tests.support.forked import forked

WRONG: dict[str, Any] = {
    "schedule": {"every": 0},
    "rules": {"dead_unit": {}, "loss_spike": {"sigma": 1}, "bad": 5, "mine": {"when": "std <"}},
}
NAMED: dict[str, Any] = {
    "stats": ["mean", {"name": "mine", "_target_": "nope.nope"}],
    "types": {"by": {"_target_": "math.pi"}},
    "samples": {"by": {"_target_": "math.squrt"}},
    "keep": {"when": ["nonfinite", {"_target_": "nope.at_all"}]},
    "probes": {
        "eyes": {"batch": {"_target_": "nope.batch"}, "samples": {"by": {"_target_": "nope.by"}}}
    },
    "interventions": {
        "a": {
            "of": "eyes",
            "select": "x",
            "do": {"_target_": "nope.do"},
            "measure": {"_target_": "nope.measure"},
            "first": [{"select": "x", "do": {"_target_": "nope.first"}}],
        },
        "b": {
            "of": "eyes",
            "select": "x",
            "do": "zero",
            "measure": {"gradient": "x", "of": {"_target_": "nope.of"}},
        },
    },
}


def places(error: SpecError) -> set[str]:
    return {line.partition(": ")[0] for line in error.problems}


def test_wrong_rules_are_said_with_all_else() -> None:
    with pytest.raises(SpecError) as raised:
        comgra.load_spec(WRONG)
    assert {
        "comgra.schedule.every",
        "comgra.rules.dead_unit",
        "comgra.rules.loss_spike",
        "comgra.rules.bad",
        "comgra.rules.mine.when",
    } <= places(raised.value)


def test_a_block_does_not_begin_with_functions_that_are_not_there() -> None:
    with pytest.raises(SpecError) as raised, comgra.trace({**WRONG, **NAMED}, name="a/b"):
        raise AssertionError("it must not begin")
    assert {
        "comgra.schedule.every",
        "comgra.rules.dead_unit",
        "comgra.stats[1]._target_",
        "comgra.types.by._target_",
        "comgra.samples.by._target_",
        "comgra.keep.when[1]._target_",
        "comgra.probes.eyes.batch._target_",
        "comgra.probes.eyes.samples.by._target_",
        "comgra.interventions.a.do._target_",
        "comgra.interventions.a.measure._target_",
        "comgra.interventions.a.first[0].do._target_",
        "comgra.interventions.b.measure.of._target_",
        "comgra.run.name",
    } <= places(raised.value)
    text = str(raised.value)
    assert "'nope.nope' cannot be imported: ModuleNotFoundError: No module named 'nope'" in text
    assert "'math.pi' is not a function but a float" in text
    assert "'math.squrt' does not exist: 'math' has no 'squrt'; did you mean 'sqrt'" in text


def test_reading_a_spec_imports_nothing_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "danger.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec: dict[str, Any] = {
        "stats": ["mean", {"name": "mine", "_target_": "danger.f"}],
        "rules": {"mine": {"_target_": "danger.Rule"}},
    }
    comgra.load_spec(spec)
    assert "danger" not in sys.modules
    with pytest.raises(SpecError, match=r"'danger.f' cannot be imported: SystemExit: imported"):
        comgra.trace({"stats": spec["stats"]}).__enter__()


def test_a_function_of_the_program_itself_may_come_later() -> None:
    spec = {"stats": ["mean", {"name": "mine", "_target_": "__main__.comes_later"}]}
    from comgra_decl.doors.checked_spec import declared

    assert "mine" in declared(spec).statistics


TRAINS = """
import sys
from pathlib import Path
sys.path.append(str(Path(__file__).parent / "own"))  # only now its modules can be found
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    print("trained", flush=True)
"""


@pytest.mark.parametrize("door", ["run", "COMGRA"])
@pytest.mark.parametrize("function", ["mine.there", "mine.not_there"])
def test_a_program_ends_before_its_first_step(tmp_path: Path, door: str, function: str) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.py").write_text("def there(x): return x.flatten(1).mean(1)\n")
    (tmp_path / "train.py").write_text(TRAINS)
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        f"defaults: [debug, _self_]\nstats: [mean, {{name: m, _target_: {function}}}]\n"
    )
    words = ["-m", "comgra_decl", "--spec", spec] if door == "run" else []
    environment = {"COMGRA": str(spec)} if door == "COMGRA" else {}
    done = forked(tmp_path, *words, "train.py", env=environment)
    if function == "mine.there":
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("trained") == 3
        return
    assert done.returncode == (2 if door == "run" else 1)
    assert "comgra.stats._target_: 'mine.not_there' does not exist: 'mine' has no" in done.stderr
    assert "Traceback" not in done.stderr
    assert "nothing was recorded" not in done.stderr
    assert "trained" not in done.stdout


def test_rules_and_functions_are_no_matter_of_a_program_that_names_none() -> None:
    code = (
        "import sys, comgra_decl as comgra\n"
        "from comgra_decl.doors.checked_spec import declared\n"
        "declared('debug', ['rules=off'])\n"
        "print([name for name in sys.modules if name.startswith('comgra_decl.rules')])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert found.strip() == "[]"


def test_the_command_line_says_all_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["schedule.every=0", "rules.dead_unit={}", str(script)])
    assert ended.value.code == 2
    assert "the spec has 2 problems" in capsys.readouterr().err


def test_a_module_that_draws_numbers_while_it_is_imported_does_not_disturb_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["import random", "import numpy", "import torch"]
    lines += ["random.random(), numpy.random.rand(), torch.rand(1)", "def f(x): return x.sum()"]
    (tmp_path / "drawing.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = random.getstate(), torch.get_rng_state()
    numbers = np.random.get_state(legacy=False)["state"]
    spec = {
        "run": {"root": str(tmp_path)},
        "stats": ["mean", {"name": "mine", "_target_": "drawing.f"}],
    }
    with comgra.trace(spec):
        assert "drawing" in sys.modules
    assert random.getstate() == before[0]
    after = np.random.get_state(legacy=False)["state"]
    assert after["pos"] == numbers["pos"]
    assert after["key"].tolist() == numbers["key"].tolist()
    assert torch.equal(torch.get_rng_state(), before[1])
