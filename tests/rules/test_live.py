"""The findings while a run is recorded are the same as those in the stored run."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.cli.main import main
from comgra_decl.errors import SpecError
from comgra_decl.query import Run
from comgra_decl.rules import diagnose
from comgra_decl.rules.finding import roots_of
from tests.support.shortened import shortened

NODES = {"all": {"select": "**", "capture": ["output", "output_grad", "parameter"]}}
EVERY = {"first": 1_000_000}


class Logs(nn.Module):
    """Takes a logarithm, which at some step is that of a negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)
        self.log = LogModule()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.log(self.first(x).square() + x[:, :1]))
        return out


class LogModule(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()


def train(steps: int = 12, *, bad: int = 7) -> None:
    torch.manual_seed(0)
    model = Logs()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        x = torch.rand(4, 3) + 0.1
        if step == bad:
            x[2, 0] = -100.0
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), torch.ones(4)).backward()
        optimizer.step()


def traced(root: Path, steps: int = 12, **spec: Any) -> Run:
    declared = {"nodes": NODES, "schedule": EVERY, **spec}
    with comgra.trace(declared, root=root, group="g") as session:
        train(steps)
    assert session.path is not None
    return comgra.open_run(session.path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.warns(UserWarning, match="target size"):
        return traced(tmp_path_factory.mktemp("runs"))


def test_the_origin_of_a_nan_is_named(run: Run) -> None:
    first, second = roots_of(diagnose(run).findings)[:2]
    assert (first.rule, first.first_step, first.sample) == ("nonfinite", 7, 2)
    assert first.place is not None
    assert first.place.node == "log"
    assert second.rule == "silent_broadcasting"


@pytest.mark.parametrize("interval", shortened([0, 0.25], tried=1))
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_live_and_stored_findings_are_the_same(tmp_path: Path, interval: float) -> None:
    run = traced(tmp_path, 40, store={"commit_interval": interval})
    live = run._snapshot.view.document("findings")
    assert live["findings"] == json.loads(json.dumps([f.to_json() for f in diagnose(run).findings]))
    assert live["unchecked"] == {u.rule: u.reason for u in diagnose(run).unchecked}
    assert len(live["findings"]) >= 2


def test_findings_are_a_table_of_the_run(run: Run) -> None:
    table = run.findings()
    assert [table[name][0] for name in ("rule", "node", "first_step")] == ["nonfinite", "log", 7]
    assert any(text.startswith("nonfinite: log ") for text in run.notes()["text"])


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_rules_that_are_off_find_nothing_and_change_no_parameter(tmp_path: Path) -> None:
    run = traced(tmp_path, rules="off")
    assert run.findings().empty
    assert diagnose(run).findings  # they can still be checked afterwards


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_finding_ends_the_training_if_the_spec_says_so(tmp_path: Path) -> None:
    declared = {
        "nodes": NODES,
        "schedule": EVERY,
        "store": {"commit_interval": 0},
        "on_finding": {"stop": "error"},
    }
    ended = pytest.raises(SystemExit, match=r"silent_broadcasting|nonfinite")
    with ended, comgra.trace(declared, root=tmp_path):
        train(5_000_000)


class PrunedError(Exception):
    """What a sweep knows how to handle."""


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_finding_raises_what_the_spec_names(tmp_path: Path) -> None:
    declared = {
        "nodes": NODES,
        "schedule": EVERY,
        "store": {"commit_interval": 0},
        "on_finding": {"stop": "error", "raises": {"_target_": f"{__name__}.PrunedError"}},
    }
    ended = pytest.raises(PrunedError, match=r"training stopped .*(silent_broadcasting|nonfinite)")
    with ended, comgra.trace(declared, root=tmp_path) as session:
        train(5_000_000)
    run = comgra.open_run(session.path or "")
    assert run.state == "finished"
    assert run.ending is None  # the program was stopped and has not failed


@pytest.mark.parametrize(
    ("raises", "problem"),
    [
        (
            "builtins.print",
            "on_finding.raises._target_: 'builtins.print' is not an exception class",
        ),
        (
            "builtins.UnicodeDecodeError",
            "'builtins.UnicodeDecodeError' cannot be created from a message alone",
        ),
        ("builtins.Nowhere", "on_finding.raises._target_: 'builtins.Nowhere'"),
        ("no.such.Module", "cannot be imported"),
    ],
)
def test_what_is_no_exception_is_refused_before_training(raises: str, problem: str) -> None:
    declared = {"on_finding": {"stop": "error", "raises": {"_target_": raises}}}
    with pytest.raises(SpecError, match=problem), comgra.trace(declared):
        pass
    with (
        pytest.raises(SpecError, match="no effect without stop"),
        comgra.trace({"on_finding": {"raises": {"_target_": "builtins.ValueError"}}}),
    ):
        pass


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_findings_are_sent_where_the_spec_says(tmp_path: Path) -> None:
    got: list[dict[str, Any]] = []
    done = threading.Event()

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            done.set()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Listener)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/x"
        traced(tmp_path, on_finding={"notify": {"url": url}})
        assert done.wait(10)
    finally:
        server.shutdown()
        server.server_close()
    assert got[0]["rule"] in ("nonfinite", "silent_broadcasting")


def test_the_command_says_what_is_wrong(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["diagnose", str(run.path)])
    assert end.value.code == 3
    printed = capsys.readouterr().out
    assert "error nonfinite" in printed
    assert "What to do" in printed
    with pytest.raises(SystemExit):
        main(["diagnose", str(run.path), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["findings"][0]["place"]["node"] == "log"
    assert "attention_collapse" in told["unchecked"]


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"dead_unit": {}}, "comgra.rules.dead_unit: unknown rule; did you mean"),
        ({"dead_units": {"shar": 0.3}}, "comgra.rules.dead_units: unknown key 'shar'"),
        ({"dead_units": {"share": 3}}, "comgra.rules.dead_units.share: 3 must be at most 1"),
        ({"mine": {"when": "std <"}}, "comgra.rules.mine.when: 'std <' is not an expression"),
        ({"mine": {"_target_": "no.such.Rule"}}, "cannot be imported"),
    ],
)
def test_a_wrong_rule_is_said_before_the_training(
    tmp_path: Path, rules: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError) as wrong, comgra.trace({"rules": rules}, root=tmp_path):
        pass
    assert said in str(wrong.value)
