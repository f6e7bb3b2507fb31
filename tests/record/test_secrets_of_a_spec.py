"""Secrets in a spec reach the functions that need them, and are neither stored nor printed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
import torch
import yaml
from torch import nn

import comgra_decl as comgra
from comgra_decl.cli.main import main
from comgra_decl.errors import SpecError
from comgra_decl.record.secrets import without_secrets
from comgra_decl.spec import load_spec

TOKEN = "tok-S3CR3T"
HOOK = f"http://127.0.0.1:9/hooks/{TOKEN}?token={TOKEN}"
EXPRESSION = "${oc.env:HOOK}"
URL = f'on_finding.notify={{url: "{EXPRESSION}", wait: 0}}'
NODES = {"a": {"select": "**", "capture": ["output"]}}

PROGRAM = """
import torch
from torch import nn
net = nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    loss = net(torch.randn(4, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
HYDRA = f"""
import hydra
@hydra.main(config_path=None, version_base=None)
def train(config):
{PROGRAM.replace(chr(10), chr(10) + "    ")}
train()
"""


def _spec(folder: Path, url: str = EXPRESSION) -> dict[str, Any]:
    return {
        "nodes": NODES,
        "on_finding": {"notify": {"url": url, "wait": 0}},
        "run": {"root": str(folder / "runs"), "name": "r"},
    }


def _program(folder: Path, *arguments: str, text: str = PROGRAM, **variables: str) -> None:
    (folder / "train.py").write_text(text)
    (folder / "own.yaml").write_text(yaml.safe_dump(_spec(folder)))
    subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "HOOK": HOOK, "OMP_NUM_THREADS": "1", **variables},
        check=True,
        capture_output=True,
        timeout=120,
    )


def by_file(folder: Path) -> None:
    _program(folder, "-m", "comgra_decl", "--spec", "own.yaml", "train.py")


def by_override(folder: Path) -> None:
    _program(folder, "-m", "comgra_decl", "--spec", "debug", URL, "run.root=runs", "train.py")


def by_variable(folder: Path) -> None:
    _program(folder, "train.py", COMGRA="own.yaml")


def by_hydra(folder: Path) -> None:
    overrides = ["+comgra=debug", "+comgra.run.root=runs", "+secrets.hook=${oc.env:HOOK}"]
    url = "+comgra.on_finding.notify.url=${secrets.hook}"
    _program(folder, "train.py", *overrides, url, text=HYDRA)


def train() -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        loss = net(torch.randn(4, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def by_trace(folder: Path) -> None:
    with comgra.trace(_spec(folder)):
        train()


def by_trace_with_plain_text(folder: Path) -> None:
    with comgra.trace(_spec(folder, HOOK)):
        train()


def by_a_checked_spec(folder: Path) -> None:
    with comgra.trace(load_spec(_spec(folder)), root=folder / "runs", overrides=["graph=false"]):
        train()


def _contents(run: Path) -> dict[str, bytes]:
    """Return the content of every file, and of every key of the database as the store reads it."""
    found = {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    database = {"driver": "ocdbt", "base": f"file://{run / 'trace.ocdbt'}/"}
    store = ts.KvStore.open(database).result()
    return found | {f"{key!r}": store.read(key).result().value for key in store.list().result()}


@pytest.mark.parametrize(
    "give",
    [
        by_trace,
        by_trace_with_plain_text,
        by_a_checked_spec,
        pytest.param(by_file, marks=pytest.mark.slow),
        pytest.param(by_override, marks=pytest.mark.slow),
        pytest.param(by_variable, marks=pytest.mark.slow),
        pytest.param(by_hydra, marks=pytest.mark.slow),
    ],
    ids=lambda give: give.__name__,
)
def test_a_secret_is_neither_stored_nor_printed(
    give: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOOK", HOOK)
    give(tmp_path)
    (stored,) = (tmp_path / "runs").rglob("spec.yaml")
    contents = _contents(stored.parent)
    assert any(b'"on_finding"' in text for text in contents.values())  # the spec is among them
    assert not [name for name, text in contents.items() if TOKEN.encode() in text]
    url = yaml.safe_load(stored.read_text())["on_finding"]["notify"]["url"]
    plain = give is by_trace_with_plain_text
    assert url == ("http://127.0.0.1:9/(not saved)" if plain else EXPRESSION)
    assert comgra.open_run(stored.parent).spec.on_finding.notify.url == url  # type: ignore[union-attr]
    for command in (["show", "--json", "--all"], ["explain"]):
        with pytest.raises(SystemExit) as ended:
            main([command[0], str(stored.parent), *command[1:]])
        assert ended.value.code in (0, 3, None)
    printed = capsys.readouterr()
    assert TOKEN not in printed.out + printed.err


def test_the_program_uses_the_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOOK", HOOK)
    notify = load_spec(_spec(tmp_path)).on_finding.notify
    assert notify is not None
    assert notify.url == HOOK


def test_a_spec_is_read_again_after_the_program_removed_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOOK", HOOK)
    with comgra.trace(_spec(tmp_path)) as session:
        train()
        monkeypatch.delenv("HOOK")
        assert isinstance(session.path, Path)
        file = session.path / "spec.yaml"
        content = yaml.safe_load(file.read_text())
        content["schedule"]["every"] = 7
        file.write_text(yaml.safe_dump(content))
        session._attendant.look()  # type: ignore[union-attr]
        train()
    notes = comgra.open_run(session.path).notes()["text"].tolist()
    told = [note for note in notes if "spec.yaml" in note]
    assert told == ["spec.yaml was changed: schedule, from step 4 on"]


def test_only_texts_are_stored_as_expressions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOOK", HOOK)
    monkeypatch.setenv("LEAST", "error")
    spec = _spec(tmp_path)
    spec["on_finding"]["notify"]["severity"] = "${oc.env:LEAST}"
    with comgra.trace(spec) as session:
        train()
    notify = comgra.open_run(session.path).spec.on_finding.notify  # type: ignore[arg-type]
    assert notify is not None
    assert (notify.severity, notify.url) == ("error", EXPRESSION)


SECRETS = [
    ("url", "https://example.org/x?token=abc", "a URL with a query"),
    ("url", "https://me:pw@example.org/x", "a URL with a login"),
    ("url", "https://example.org/hooks/3f2b8c1e9a7d4f60", "a URL with a token in its path"),
    ("slack", "https://hooks.slack.com/services/T0/B0/x", "a URL with a token in its path"),
]


@pytest.mark.parametrize(("key", "url", "what"), SECRETS, ids=lambda text: text[:16])
def test_a_url_with_a_secret_must_come_from_the_environment(
    key: str, url: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = _spec(tmp_path)
    spec["on_finding"]["notify"] = {key: url}
    with pytest.raises(SpecError) as raised:
        load_spec(spec)
    assert f"notify.{key}: {what} must come from the environment" in str(raised.value)
    assert url not in str(raised.value)
    monkeypatch.setenv("HOOK", url)
    spec["on_finding"]["notify"] = {key: EXPRESSION}
    assert load_spec(spec).on_finding.notify.model_dump()[key] == url  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "notify",
    [
        {"url": "https://hooks.example.org/training/runs"},
        {"slack": "https://chat.example.org"},
        {"url": HOOK},
        {"slack": HOOK.replace("127.0.0.1", "localhost")},
        {"url": "http://[::1]:8000/services/3f2b8c1e9a7d4f60"},
    ],
)
def test_urls_without_secrets_and_of_this_machine_may_be_plain(
    notify: dict[str, str], tmp_path: Path
) -> None:
    spec = _spec(tmp_path)
    spec["on_finding"]["notify"] = notify
    assert load_spec(spec).on_finding.notify is not None


def test_a_password_must_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    email = {"host": "h", "to": "me@example.org", "user": "me", "password": "plain"}
    spec = {"on_finding": {"notify": {"email": email}}}
    with pytest.raises(
        SpecError, match=r"email\.password: the whole password must come from the environment"
    ):
        load_spec(spec)
    monkeypatch.setenv("PASSWORD", "from there")
    for partly in ("plain${oc.env:PASSWORD}", "${oc.env:NOT_SET,plain}", "${oc.env:PASSWORD, x}"):
        email["password"] = partly
        with pytest.raises(SpecError, match="the whole password must come from the environment"):
            load_spec(spec)
    email["password"] = "${oc.env:PASSWORD}"
    loaded = load_spec(spec).on_finding.notify
    assert loaded is not None
    assert loaded.email is not None
    assert loaded.email.password == "from there"


def test_the_default_of_an_expression_is_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = "https://hooks.slack.com/services/T000/B000/abcdefgh1234567890"
    spec = {"on_finding": {"notify": {"slack": f"${{oc.env:NOT_SET,'{hook}'}}"}}}
    with pytest.raises(SpecError, match="slack: a URL with a token in its path must come from"):
        load_spec(spec)
    monkeypatch.setenv("HOOK", hook)
    spec["on_finding"]["notify"] = {"slack": "${oc.env:HOOK}"}
    assert load_spec(spec).on_finding.notify is not None


def test_an_error_does_not_repeat_a_password() -> None:
    email = {"host": "h", "to": "me@example.org", "user": "me", "password": "hunter2"}
    spec = {"on_finding": {"notify": [{"email": email}]}}
    with pytest.raises(SpecError) as raised:
        load_spec(spec)
    assert "hunter2" not in str(raised.value)


def test_an_address_that_was_not_saved_must_be_stated_again(tmp_path: Path) -> None:
    by_trace_with_plain_text(tmp_path)
    spec = comgra.open_run(tmp_path / "runs").spec
    with pytest.raises(SpecError, match="was not saved with the run"), comgra.trace(spec):
        pass


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("token", "hf_aZ19dk30sLq2MfP07x", True),
        ("hub.key", "0123456789abcdef0123", True),
        ("key", "user_identifier", False),
        ("token", "<|endoftext|>", False),
        ("pad_token", "hf_aZ19dk30sLq2MfP07x x", False),
        ("tokens", "hf_aZ19dk30sLq2MfP07x", False),
    ],
)
def test_a_bare_token_is_a_secret_if_it_looks_like_one(name: str, value: str, secret: bool) -> None:
    assert (without_secrets([f"{name}={value}"]) == [f"{name}=(not saved)"]) is secret


def test_addresses_on_the_command_line_are_masked() -> None:
    given = ["python", f"on_finding.notify={{url: {HOOK}, timeout: 3}}", "x=http://a.b/c"]
    shown = "on_finding.notify={url: http://127.0.0.1:9/(not saved), timeout: 3}"
    assert without_secrets(given) == ["python", shown, "x=http://a.b/c"]
