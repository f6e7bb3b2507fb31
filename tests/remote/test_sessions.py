"""Training is recorded to a bucket, whatever happens to the bucket in the meantime."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.cli.main import main
from comgra_decl.errors import ComgraError, StoreError
from comgra_decl.record.context import RunContext
from comgra_decl.record.live_spec import Attendant
from comgra_decl.record.placement import place_run
from comgra_decl.record.ranks import Rank
from comgra_decl.record.session import Session
from comgra_decl.spec import Spec
from comgra_decl.spec.run import RunSpec
from comgra_decl.store import WriterThread
from comgra_decl.store.location import Remote
from comgra_decl.store.remote import INTERVAL, Objects
from tests.remote.server import BUCKET, fake_s3
from tests.store.threads import until

SPEC: dict[str, Any] = {
    "nodes": {"all": {"select": "**", "capture": ["output", "parameter"]}},
    "schedule": {"first": 100},
    "store": {"commit_interval": 0},
}


def train(steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def traced(root: object, **spec: Any) -> tuple[list[float], Session]:
    with comgra.trace({**SPEC, **spec}, root=str(root), group="g", name="run") as session:
        losses = train()
    return losses, session


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def is_there(session: Session) -> bool:
    """Whether the writer thread has created the run."""
    with suppress(ComgraError):
        return comgra.open_run(str(session.path)).name == "run"
    return False


def test_a_training_is_recorded_and_is_what_it_was(root: Remote, tmp_path: Path) -> None:
    plain, (losses, session) = train(), traced(root)
    _, local = traced(tmp_path)
    assert losses == plain
    assert str(session.path) == f"{root}/g/run"
    run, same = comgra.open_run(str(session.path)), comgra.open_run(str(local.path))
    assert (run.state, run.group, run.name) == ("finished", "g", "run")
    assert list(run.steps) == [0, 1, 2, 3]
    assert run.spec.store.commit_interval == 0
    for step in run.steps.tolist():
        assert run.row(step).equals(same.row(step))
    written = Objects(root / "g" / "run").read("spec.yaml", most=1 << 20)
    assert written is not None
    assert b"commit_interval: 0" in written


@pytest.mark.slow
def test_a_name_that_is_taken_gets_a_number(root: Remote) -> None:
    paths = [str(traced(root)[1].path) for _ in range(2)]
    assert paths == [f"{root}/g/run", f"{root}/g/run-2"]
    _, session = traced(root, run={"resume": paths[0]})
    assert str(session.path) == paths[0]
    assert len(comgra.open_run(paths[0]).sessions) == 2
    _, session = traced(root, run={"resume": True})
    assert str(session.path) == f"{root}/g/run"


def test_a_bucket_out_of_reach_is_said_and_the_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = train()
    with caplog.at_level(logging.ERROR, "comgra_decl"):
        losses, session = traced("s3://a-bucket/runs")  # nothing listens
    assert losses == plain
    assert session.path is None
    assert re.search(r"nothing is recorded: s3://a-bucket/.*retry attempts failed", said(caplog))


@pytest.fixture
def guarded() -> Iterator[str]:
    """The URL of a store that denies access."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_PUT = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_who_is_not_let_in_is_told_what_was_asked(
    guarded: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", guarded)
    with caplog.at_level(logging.ERROR, "comgra_decl"):
        _, session = traced("s3://a-bucket/runs")
    assert session.path is None
    assert "AWS_ACCESS_KEY_ID" in said(caplog)
    with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID"):
        comgra.open_run("s3://a-bucket/runs")


def test_a_bucket_that_goes_away_ends_the_recording_but_not_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    defaults = WriterThread.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "patience", 0.1)
    root = Remote("s3", BUCKET, "runs")
    plain = train() + train()
    with caplog.at_level(logging.WARNING, "comgra_decl"):
        with fake_s3() as url:
            monkeypatch.setenv("AWS_ENDPOINT_URL", url)
            opened = comgra.trace(SPEC, root=str(root), group="g", name="run")
            session = opened.__enter__()
            losses = train()
            until(lambda: is_there(session))
        losses += train()
        opened.__exit__(None, None, None)
    assert losses == plain
    assert str(session.path) == f"{root}/g/run"
    assert said(caplog).count("keeping the data and trying again") == 1
    assert said(caplog).count("the store cannot be written") == 1


def test_the_example_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "store.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    with fake_s3("my-bucket") as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        exec(example, names)  # the page's own code
    assert names["run"].state == "finished"
    assert len(names["run"].steps) > 10


@pytest.mark.parametrize(("asked", "kept"), [(0, 0), (0.5, INTERVAL), (30, 30)])
def test_commits_to_a_bucket_are_rare(asked: float, kept: float, tmp_path: Path) -> None:
    spec = Spec.model_validate({**SPEC, "store": {"commit_interval": asked}})
    session = Session(spec, context=RunContext(base=tmp_path))
    assert session._commit_interval(Remote("s3", BUCKET, "run")) == kept
    assert session._commit_interval(tmp_path) == asked


def test_ranks_need_a_name_for_their_run(root: Remote, tmp_path: Path) -> None:
    context, named = RunContext(base=tmp_path), RunSpec(root=str(root), group="g", name="run")
    ranks = [Rank(0, 2), Rank(1, 2)]
    places = [place_run(named, context, rank=rank) for rank in ranks]
    assert [place.run for place in places] == [root / "g" / "run"] * 2
    assert [place.path for place in places] == [root / "g" / "run", root / "g" / "run" / "ranks/1"]
    with pytest.raises(StoreError, match=r"already contains a run; choose another run\.name"):
        place_run(named, context, rank=ranks[0])
    with pytest.raises(StoreError, match=r"run\.name=NAME"):
        place_run(RunSpec(root=str(root)), context, rank=ranks[0])


def test_the_size_of_a_run_is_what_was_written(root: Remote) -> None:
    measured = []
    original = Attendant._stored_bytes

    def look(attendant: Attendant) -> int:
        measured.append(original(attendant))
        return measured[-1]

    def looked(running: Session) -> int:
        assert running._attendant is not None
        running._attendant.look()
        return measured[-1]

    session = comgra.trace(
        {**SPEC, "schedule": {"first": 100, "budget": {"disk": "1GB"}}}, root=str(root)
    )
    with pytest.MonkeyPatch.context() as patch, session as running:
        patch.setattr(Attendant, "_stored_bytes", look)
        train()
        until(lambda: looked(running) > 0)
    stored = sum(
        len(Objects(root).read(name, most=1 << 30) or b"") for name in Objects(root).names()
    )
    assert 0 < measured[-1] < 3 * stored


def test_the_command_line_takes_urls(
    root: Remote, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traced(root)

    def asked(*words: str) -> Any:
        with pytest.raises(SystemExit) as end:
            main([*words, "--json"])
        assert end.value.code in (0, None)
        return json.loads(capsys.readouterr().out)

    (line,) = asked("ls", str(root))["runs"]
    assert (line["name"], line["state"]) == ("run", "finished")
    assert asked("show", f"{root}/g")["path"] == f"{root}/g/run"
    assert asked("verify", f"{root}/g/run")["whole"]
    nothing: dict[str, Any] = {"left_out": {}, "not_shown": {}}
    copy = asked("cp", f"{root}/g/run", str(tmp_path / "copy"))
    assert copy == {"path": str(tmp_path / "copy"), "source": f"{root}/g/run", **nothing}
    assert asked("cp", str(tmp_path / "copy"), f"{root}/g/copy")["path"] == f"{root}/g/copy"
    exported = asked("export", f"{root}/g/run", str(tmp_path / "tables"), "--format", "csv")
    assert (Path(exported["path"]) / "statistics.csv").exists()
    with pytest.raises(SystemExit):
        main(["export", f"{root}/g/run", f"{root}/tables"])
    assert "cannot be written to 's3://" in capsys.readouterr().err
