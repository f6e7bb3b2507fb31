"""Samples that influence each other are detected, whatever causes it; independent ones are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import comgra_decl
from comgra_decl.cli.main import main
from comgra_decl.experiments.batch_mixing import Mixing, asking, worst_of
from comgra_decl.rules import diagnose, health
from tests.support.programs import interpreter_kept

OWN = torch.Generator()
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Does(nn.Module):
    """Applies an arbitrary function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.between = Between(function)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self.first(x)))
        return out


class Between(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def asked(net: nn.Module, *given: Tensor, dim: int = 0) -> Mixing:
    """Trains a network for one step; returns the verdict on it."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = [parameter.clone() for parameter in net.parameters()]
    found: list[Mixing] = []
    with asking(found, KeyboardInterrupt, dim=dim):
        net(*given).sum().backward()
        net(*given)  # the second call is not tested again
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert len(found) <= 1
    assert all(map(torch.equal, net.parameters(), before))
    return worst_of(found)


APART: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "softmax": lambda x: x.softmax(1),
    "layer norm": lambda x: nn.functional.layer_norm(x, x.shape[1:]),
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "shuffled and back": lambda x: x.flip(0).relu().flip(0),
}
MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax over samples": lambda x: x.softmax(0),
    "centred over samples": lambda x: x - x.mean(0),
    "a view of the wrong shape": lambda x: x.t().reshape(6, 8),
    "shuffled": lambda x: x.roll(1, 0),
    "the largest of all": lambda x: x / x.abs().max(),
}


@pytest.mark.parametrize("name", APART)
def test_samples_that_are_kept_apart(name: str) -> None:
    verdict = asked(Does(APART[name]), X)
    assert (verdict.outcome, verdict.model, verdict.change) == ("apart", "Does", 0.0)


@pytest.mark.parametrize("name", MIXED)
def test_samples_that_are_mixed_are_found_where_it_begins(name: str) -> None:
    verdict = asked(Does(MIXED[name]), X)
    assert (verdict.outcome, verdict.node) == ("mixed", "between")
    assert verdict.change > 1e-3


def test_what_mixes_between_modules_is_said_to_begin_before_the_next_one() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            out: Tensor = self.last(hidden - hidden.mean(0))
            return out

    verdict = asked(Centred(), X)
    assert "begins before last" in verdict.reason


def test_batchnorm_is_told_apart_and_does_not_hide_anything() -> None:
    norm = nn.BatchNorm1d(8)
    verdict = asked(nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 3)), X)
    assert (verdict.outcome, verdict.change > 0) == ("norm", True)
    assert norm.training
    assert norm.num_batches_tracked == 2  # how the program's own calls changed it
    hidden = nn.Sequential(nn.BatchNorm1d(8), Does(lambda x: x.softmax(0)))
    assert asked(hidden, X).node == "1.between"


def test_the_training_goes_on_as_it_would_have() -> None:
    torch.manual_seed(1)
    drop = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    torch.manual_seed(2)
    expected = [drop(X) for _ in range(2)]
    torch.manual_seed(2)
    with asking([], KeyboardInterrupt):
        assert all(torch.equal(drop(X), one) for one in expected)


def test_whole_numbers_and_another_dimension_are_asked_as_well() -> None:
    tokens = torch.arange(12).reshape(6, 2)
    embedded = nn.Sequential(nn.Embedding(12, 4), nn.Flatten(), nn.Linear(8, 8))
    assert asked(embedded, tokens).outcome == "apart"
    assert asked(nn.Sequential(embedded, Does(lambda x: x.cumsum(0))), tokens).outcome == "mixed"
    recurrent = nn.Sequential(nn.RNN(8, 4), Between(lambda x: x[0]))
    timed = torch.randn(5, 3, 8)
    assert asked(recurrent, timed).outcome == "mixed"  # time is the first dimension
    assert asked(recurrent, timed, dim=1).outcome == "apart"


@pytest.mark.parametrize(
    ("net", "given", "said"),
    [
        (nn.Linear(8, 3), X[:1], "has size 1 in dimension 0"),
        (
            nn.Sequential(nn.Linear(8, 3), Between(torch.sum)),
            X,
            "no output has the batch dimension",
        ),
        (Does(lambda x: x + torch.randn(1, generator=OWN)), X, "its output differs"),
        (nn.Linear(8, 3).eval(), X, "no model with parameters"),
    ],
)
def test_what_cannot_be_told_is_said(net: nn.Module, given: Tensor, said: str) -> None:
    verdict = asked(net, given)
    assert verdict.outcome == "unclear"
    assert said in verdict.reason


TRAIN = """
import sys, torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.Softmax(int(sys.argv[1])), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for step in range(4):
    net(torch.randn(6, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("ends")
"""


def test_the_verdict_on_a_script_reaches_the_checklist_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with comgra_decl.trace("debug", root=tmp_path / "runs") as session:
        net(X).sum().backward()
        optimizer.step()
    run = comgra_decl.open_run(session.path)  # type: ignore[arg-type]
    question = "Are the samples in a batch independent?"
    answers = {check.question.text: check for check in health(diagnose(run))}
    assert answers[question].colour == "unchecked"
    monkeypatch.chdir(tmp_path)
    for dim, code, colour in (("1", 0, "green"), ("0", 3, "red")):
        with pytest.raises(SystemExit) as end, interpreter_kept():
            main(["batch-mixing", "--for", str(run.path), "--json", "--", "train.py", dim])
        assert end.value.code == code
        printed = capsys.readouterr()
        assert json.loads(printed.out)["node"] == ("1" if code else None)
        assert "ends" not in printed.err
        answers = {check.question.text: check for check in health(diagnose(run))}
        assert answers[question].colour == colour
        assert "batch-mixing, 20" in answers[question].evidence


@pytest.mark.parametrize(
    "arguments", [["--batch-dim", "x", "train.py"], ["--for", "nowhere", "train.py"], ["--for"]]
)
def test_a_wrong_command_line_is_said(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["batch-mixing", *arguments])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("comgra-decl batch-mixing: --")
