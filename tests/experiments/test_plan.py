"""The dry run reports what a spec would record, its size and its cost, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import comgra_decl as comgra
from comgra_decl.experiments.plan import recorded_steps, size_text
from comgra_decl.spec import Scheduler, load_spec
from tests.support.forked import forked
from tests.support.programs import HYDRA_YAML, TRAINING, Ended, command

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(f"{TRAINING}\ntrain(1000)\n")
    return tmp_path


def line_of(content: dict[str, Any], **what: Any) -> dict[str, Any]:
    (line,) = [line for line in content["tensors"] if all(line[key] == what[key] for key in what)]
    return line


def plan(folder: Path, *arguments: str) -> Ended:
    return command(folder, "plan", *arguments)


def plan_of_its_own(folder: Path, *arguments: str) -> Any:
    """Runs in a separate process, which ends when the program does."""
    code = "import sys; from comgra_decl.cli.main import main; main(sys.argv[1:])"
    return forked(folder, "-c", code, "plan", *arguments)


def test_a_plan_says_what_is_caught_and_leaves_nothing_behind(folder: Path) -> None:
    done = plan_of_its_own(folder, "--json", "samples.count=3", "train.py")
    content = json.loads(done.stdout)
    assert done.returncode == 0
    assert content["entries"]["all"] == {
        "matched": 4,
        "fired": 4,
        "written": 8,
        "never_called": [],
    }
    output = line_of(content, node="0", role="output", **{"pass": "forward"})
    assert output["shape"] == [5, 4]
    assert output["dtype"] == "float32"
    assert output["kind"] == "computed"
    assert output["samples"] == 3
    assert line_of(content, node="2", role="weight", **{"pass": "grad"})["samples"] is None
    assert sorted(path.name for path in folder.iterdir()) == ["train.py"]
    assert "loss" not in done.stderr  # training never reached its end


def test_the_bytes_of_a_plan_are_those_of_a_record(folder: Path) -> None:
    content = json.loads(plan(folder, "--json", "train.py").stdout)
    slots, statistics, bins, samples = len(content["tensors"]), 9, 64, 8
    size = content["bytes"]
    assert size["statistics"] == slots * statistics * 3 * 4
    assert size["samples"] == slots * samples * statistics * 4
    assert size["histograms"] == slots * (bins + 2) * 4
    # the values of eight samples, of which the batch has five; the model shares its last output
    assert size["values"] > 0
    assert size["on_disk"] > 0
    assert content["price"]["recorded_ms"] > 0


def test_a_pattern_that_matches_nothing_is_the_exit_code(folder: Path) -> None:
    done = plan(folder, "nodes.mine={select: '0x'}", "train.py")
    assert done.returncode == 3
    assert "matches nothing" in done.stdout
    assert "'0x' matches no module" in done.stdout


def test_a_broken_spec_ends_before_the_program_starts(folder: Path) -> None:
    done = plan(folder, "schedule.evry=3", "nodes.mine={}", "train.py")
    assert done.returncode == 2
    assert "2 problems" in done.stderr
    assert "every" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_the_error_of_a_program_is_its_own(folder: Path) -> None:
    (folder / "fails.py").write_text("raise RuntimeError('mine')\n")
    done = plan_of_its_own(folder, "fails.py")
    assert done.returncode == 1
    assert "RuntimeError: mine" in done.stderr
    assert done.stdout == ""


def test_a_program_without_a_model_is_said(folder: Path) -> None:
    (folder / "nothing.py").write_text("print('hello')\n")
    done = plan(folder, "nothing.py")
    assert done.returncode == 3
    assert "before any tensor was recorded" in done.stdout
    assert "hello" in done.stderr


def test_a_program_that_only_evaluates_has_a_plan(folder: Path) -> None:
    (folder / "look.py").write_text(
        "import torch\nmodel = torch.nn.Linear(2, 1)\n"
        "with torch.no_grad():\n    model.eval()(torch.ones(3, 2))\n"
    )
    done = plan(folder, "look.py")
    assert done.returncode == 0, done.stderr
    assert "Linear" in done.stdout
    assert "not measured" in done.stdout


def test_the_program_ends_cleanly_and_early(folder: Path) -> None:
    (folder / "counts.py").write_text(
        f"{TRAINING}\nfrom torch.optim.optimizer import register_optimizer_step_post_hook\n"
        "steps = []\nregister_optimizer_step_post_hook(lambda *_: steps.append(1))\n"
        "try:\n    train(1000)\nexcept:  # even this\n    print('caught')\n"
        "try:\n    train(1000)\nfinally:\n    print('cleaned up', len(steps))\n"
    )
    done = plan_of_its_own(folder, "counts.py")  # it leaves one of its own hooks behind
    assert done.returncode == 0
    assert "caught" in done.stderr
    assert "cleaned up 6" in done.stderr  # the seventh step ended the program
    assert done.stdout.count("What the spec records") == 1


def test_a_hydra_application_has_a_plan(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("lr: 0.1\n")
    (tmp_path / "train.py").write_text(HYDRA_YAML)
    done = forked(tmp_path, "train.py", "+comgra=debug", "+comgra.dry_run=true")
    assert done.returncode == 0, done.stderr
    assert "What the spec records" in done.stdout
    assert "nothing was stored" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_what_a_program_records_on_its_own_is_not_stored_during_a_plan(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        f"import comgra_decl as comgra\n{TRAINING}\n"
        "with comgra.trace('debug') as session:\n    print('path', session.path)\n    train(1000)\n"
    )
    done = plan(tmp_path, "own.py")
    assert done.returncode == 0, done.stderr
    assert "nothing was stored" in done.stdout
    assert "path None" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]


def test_the_tutorial_has_a_plan(tmp_path: Path) -> None:
    script = str(EXAMPLES / "tutorial" / "train.py")
    done = forked(
        tmp_path, script, "+comgra=light", "+comgra.dry_run=true", "hydra.output_subdir=null"
    )
    assert done.returncode == 0, done.stderr
    assert "RunningSum" in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("example", ["digits", "characters"])
def test_the_examples_have_a_plan(tmp_path: Path, example: str) -> None:
    script = str(EXAMPLES / example / "train.py")
    done = plan_of_its_own(
        tmp_path, "--json", "samples.count=2", script, "hydra.output_subdir=null"
    )
    content = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert content["price"]["recorded_ms"] > 0
    assert {line["kind"] for line in content["tensors"]} >= {"input", "target", "loss"}
    assert not (tmp_path / "runs").exists()


def test_everything_that_decides_about_steps_is_planned_too(folder: Path) -> None:
    (folder / "adversary.py").write_text(
        "import torch\nfrom torch import nn\nimport comgra_decl as comgra\n"
        "made, critic = nn.Linear(2, 3), nn.Linear(3, 1)\n"
        "ends = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (made, critic)]\n"
        "for step in range(1000):\n"
        "    comgra.tag('odd' if step % 2 else 'even')\n"
        "    for end in ends:\n"
        "        end.zero_grad()\n"
        "        critic(made(torch.ones(4, 2))).sum().backward()\n"
        "        end.step()\n"
    )
    changes = ["schedule.types.odd={every: 5}", "schedule.budget.time='3%'", "keep={ring: 5}"]
    done = plan(folder, "--json", *changes, "adversary.py")
    content = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert len(content["remarks"]) == 4
    assert {line["node"] for line in content["tensors"]} >= {"Linear", "loss"}
    assert content["forecast"][0]["share"] == pytest.approx(
        content["price"]["added_ms"] / content["price"]["plain_ms"]
    )


def test_a_plan_names_what_it_does_not_forecast(folder: Path) -> None:
    changes = ["probes.eyes={}", "interventions.none={of: eyes, select: '0', do: zero}"]
    done = plan(folder, "--json", *changes, "checkpoints={every: 5}", "train.py")
    (remark,) = [text for text in json.loads(done.stdout)["remarks"] if "not forecast" in text]
    assert "probe eyes, intervention none, checkpoints" in remark


def test_a_dry_run_in_code_ends_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    code: dict[str, Any] = {}
    exec(TRAINING, code)
    with pytest.raises(SystemExit) as ended, comgra.trace("debug", overrides=["dry_run=true"]):
        code["train"](1000)
    code["train"](1)  # later code may train
    assert ended.value.code == 0
    assert "What the spec records" in capsys.readouterr().out


@pytest.mark.parametrize(
    "schedule",
    [
        {"first": 10, "every": 1, "backoff": 1.1},
        {"first": 1, "every": 50},
        {"first": 0, "every": None, "windows": [[5, 9]]},
        {"steps": [3, 500, 5000]},
    ],
)
def test_records_are_foretold_by_the_schedule_itself(schedule: dict[str, Any]) -> None:
    spec = load_spec({"nodes": {"all": {"select": "**"}}, "schedule": schedule})
    scheduler = Scheduler(spec.schedule)
    due = [step for step in range(2000) if scheduler.next_after(step - 1) == step]
    assert recorded_steps(spec, 2000) == len(due)


def test_sizes_are_written_as_people_do() -> None:
    sizes = [None, 0, 999, 1000, 42_349, 1_500_000, 999_999, 5 * 10**13]
    assert [size_text(size) for size in sizes] == [
        "-",
        "0 B",
        "999 B",
        "1 kB",
        "42.3 kB",
        "1.5 MB",
        "1 MB",
        "50 TB",
    ]
