"""A step that was recorded is repeated bit by bit in a new process, or with something changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.doors.replay import Batch
from comgra_decl.errors import ReplayError, UnknownNameError
from comgra_decl.hooks.schedule.budget import Meter
from comgra_decl.query import Run
from comgra_decl.query.compare import compare
from comgra_decl.store.compaction import compact
from comgra_decl.store.copying import copy_run
from comgra_decl.store.verify import verify
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.compare import statistics_of
from comgra_decl.viewer.model.comparison_target import other_of
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.model.sheet import slot_of
from tests.support.programs import python
from tests.support.recording import EVERYTHING, recording
from tests.support.shortened import shortened

PROGRAM = '''
import random
import numpy as np, torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    """Draws from every generator, and has a frozen layer and one in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, x, *, scale):
        x = self.drop(self.norm(self.first(x))) * random.uniform(0.5, 1.0)
        return self.head(self.frozen(x) * scale + float(np.random.rand()))

def made():
    torch.manual_seed(0)
    model = Net().train()
    model.norm.eval()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)
'''
exec(compile(PROGRAM, "program", "exec"))
made: Callable[[], tuple[Any, torch.optim.Optimizer]] = globals()["made"]

SPEC: dict[str, Any] = {
    "nodes": {
        "all": {
            "select": "**",
            "capture": ["output", "output_grad", "parameter", "parameter_grad", "update"],
            "values": True,
        }
    },
    "schedule": {"first": 1, "every": 4},
    "checkpoints": {"every": 1, "replay": {"steps": 3}},
    "samples": {"count": 8},
    "rules": "off",
    "perturbations": False,
}


REPLAYED = {**SPEC, "schedule": {"every": 1}, "checkpoints": {"every": 1, "replay": True}}


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(steps)
    ]


def train(steps: int) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Train; return the model and its parameters after each step."""
    model, optimizer = made()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    states = []
    for x, y in batches(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x, scale=0.5), y).backward()
        optimizer.step()
        schedule.step()
        states.append(copy.deepcopy(model.state_dict()))
    return model, states


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[dict[str, Tensor]]]:
    with comgra.trace(SPEC, root=tmp_path_factory.mktemp("runs")) as session:
        _, states = train(12)
    return comgra.open_run(session.path or ""), states


def played(run: Run, step: int, **options: Any) -> tuple[comgra.Look, Any]:
    model, optimizer = made()
    chosen = {"loss": F.cross_entropy, **options}
    return comgra.replay(run, step, model=model, optimizer=optimizer, **chosen), model


@pytest.mark.slow
def test_the_steps_after_a_checkpoint_are_recorded_too(
    recorded: tuple[Run, list[dict[str, Tensor]]],
) -> None:
    run, _ = recorded
    assert run.steps.tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert run.checkpoints.tolist() == [0, 4, 8]
    assert set(run.types) == {"train", "checkpoint", "replay"}


@pytest.mark.slow
def test_a_new_process_repeats_the_steps_bit_by_bit(
    recorded: tuple[Run, list[dict[str, Tensor]]], tmp_path: Path
) -> None:
    run, _ = recorded
    code = (
        PROGRAM
        + f"""
import comgra_decl as comgra
run = comgra.open_run({str(run.path)!r})
torch.set_num_threads(1 + torch.get_num_threads())
model, optimizer = made()
for value in (*model.parameters(), *model.buffers()):
    value.data.zero_()
before = random.getstate(), torch.get_rng_state()
step = run.checkpoints[-1]
again = comgra.replay(run, step, model=model.eval(), optimizer=optimizer, loss=F.cross_entropy)
assert not model.training and random.getstate() == before[0]
assert torch.equal(torch.get_rng_state(), before[1])
assert again.steps.tolist() == [step] == [again.step], again.steps
compared = 0
for row in again.slots.itertuples():
    if row.kind == "loss":
        continue
    names = dict(role=row.role, of=getattr(row, "_4"), iteration=row.iteration)
    now, then = (r.slot(row.node, **names).value(step) for r in (again, run))
    assert now.dtype == then.dtype and now.tobytes() == then.tobytes(), row
    compared += 1
print(compared)
"""
    )
    done = python(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


def test_the_next_steps_follow_with_their_own_batches_and_learning_rates(
    recorded: tuple[Run, list[dict[str, Tensor]]],
) -> None:
    run, states = recorded
    step = int(run.checkpoints[1])
    again, model = played(run, step, steps=3)
    assert again.steps.tolist() == [step, step + 1, step + 2]
    assert all(torch.equal(t, states[step + 2][n]) for n, t in model.state_dict().items())
    table = compare([run, again], "head")
    both = table.loc[[step, step + 1, step + 2]]
    assert (both.iloc[:, 0] == both.iloc[:, 1]).all()


def halved(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] /= 2


def clipped(model: Any, _: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def steep(output: Tensor, target: Tensor) -> Tensor:
    """A loss whose gradients have a norm above 1."""
    return 50 * F.cross_entropy(output, target)


def frozen(model: Any, _: Any) -> None:
    model.first.weight.grad = model.first.bias.grad = None


CHANGES: dict[str, tuple[dict[str, Any], Callable[[Any, torch.optim.Optimizer], None]]] = {
    "learning rate": ({"lr": 0.5}, halved),
    "clipping": ({"clip": 1.0}, clipped),
    "frozen layer": ({"freeze": "first"}, frozen),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_has_the_effect_that_it_has_in_a_plain_loop(name: str, tmp_path: Path) -> None:
    change, plain = CHANGES[name]

    def trained(*, changed: bool) -> dict[str, Tensor]:
        np.random.seed(0), random.seed(0)
        model, optimizer = made()
        for step, (x, y) in enumerate(batches(2)):
            optimizer.zero_grad()
            steep(model(x, scale=0.5), y).backward()
            if changed and step == 1:
                plain(model, optimizer)
            optimizer.step()
        return model.state_dict()

    with comgra.trace(REPLAYED, root=tmp_path) as session:
        usual = trained(changed=False)
    run = comgra.open_run(session.path or "")
    assert run.checkpoints.tolist() == [0, 1]
    again, model = played(run, 1, change=change, loss=steep)
    expected = trained(changed=True)
    assert all(torch.equal(t, expected[n]) for n, t in model.state_dict().items())
    assert not all(torch.equal(t, expected[n]) for n, t in usual.items())
    assert again.config == {"replay": {"run": str(run.path), **change}}
    assert model.first.weight.requires_grad


def test_samples_that_are_left_out_do_not_take_part(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, labels = torch.randint(11, (4, 5)), torch.randint(11, (4, 5))
    before: Any = copy.deepcopy(model)
    with comgra.trace({**SPEC, "checkpoints": {"replay": True}}, root=tmp_path) as session:
        F.cross_entropy(model(tokens).view(-1, 11), labels.view(-1)).backward()
        optimizer.step()
    again = comgra.replay(
        session.path or "",
        0,
        model=model,
        optimizer=optimizer,
        loss=lambda logits, labels: F.cross_entropy(logits.view(-1, 11), labels),
        change={"without": [2, -1]},
    )
    kept = [0, 1]
    F.cross_entropy(before(tokens[kept]).view(-1, 11), labels[kept].view(-1)).backward()
    expected: Any = before[1].weight.grad
    found = again.slot("1", role="weight", of="grad").value(0)[0]
    assert np.array_equal(found, expected)
    assert again.name == "step-0-without-2--1"


def test_a_step_with_several_calls_and_a_scaler_has_a_train_step_of_its_own(tmp_path: Path) -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, *batches: Any) -> None:
        optimizer.zero_grad()
        for batch in batches:
            loss = F.mse_loss(model(*batch.args), batch.target) / len(batches)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    torch.manual_seed(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    states = []
    with comgra.trace(REPLAYED, root=tmp_path) as session:
        for _ in range(3):
            halves = [Batch((torch.randn(4, 3),), {}, (torch.randn(4, 1),)) for _ in range(2)]
            train_step(model, optimizer, *halves)
            states.append(copy.deepcopy(model.state_dict()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    fresh = nn.Linear(3, 1)
    own = torch.optim.Adam(fresh.parameters(), lr=7.0)
    given: dict[str, Any] = {"model": fresh, "optimizer": own}
    with pytest.raises(ReplayError, match="pass the one that train_step uses as `scaler`"):
        comgra.replay(session.path or "", 2, **given, train_step=train_step)
    comgra.replay(session.path or "", 2, **given, train_step=train_step, scaler=scaler)
    assert all(torch.equal(t, states[2][n]) for n, t in fresh.state_dict().items())
    assert scaler.get_scale() == 64.0
    with pytest.raises(ReplayError, match=r"called the model 2 times. Pass train_step"):
        comgra.replay(session.path or "", 2, **given, loss=F.mse_loss, scaler=scaler)


@pytest.mark.parametrize(
    "between",
    shortened([lambda: torch.rand(1), np.random.rand, random.random], tried=1),
    ids=["torch", "numpy", "random"],
)
def test_numbers_that_the_program_draws_between_the_calls_of_a_step_are_no_part_of_it(
    between: Callable[..., Any], tmp_path: Path
) -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, *batches: Any) -> None:
        optimizer.zero_grad()
        for batch in batches:
            F.mse_loss(model(*batch.args, **batch.kwargs), batch.target).backward()
        optimizer.step()

    model, optimizer = made()
    with comgra.trace(REPLAYED, root=tmp_path) as session:
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(3):
                F.mse_loss(model(torch.randn(4, 6), scale=2.0), torch.randn(4, 3)).backward()
                between()
            optimizer.step()
    run = comgra.open_run(session.path or "")
    for step in run.steps:
        fresh, own = made()
        again = comgra.replay(run, step, model=fresh, optimizer=own, train_step=train_step)
        assert again.row(step).equals(run.row(step))


def test_copied_and_compacted_runs_can_be_replayed(
    recorded: tuple[Run, list[dict[str, Tensor]]], tmp_path: Path
) -> None:
    run, states = recorded
    copied = copy_run(run.path, tmp_path / "copy")
    compact(tmp_path / "copy")
    assert verify(copied).damages == []
    again, model = played(comgra.open_run(copied), 4)
    assert all(torch.equal(t, states[4][n]) for n, t in model.state_dict().items())
    saved = again.save(tmp_path / "again")
    assert comgra.open_run(saved).steps.tolist() == [4]


class Graph:
    """An argument that is no tensor, and contains none that could be found."""


def several(model: nn.Module, other: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    other(model(torch.ones(2, 3))).sum().backward()
    optimizer.step()


def parts(model: Any, _: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[1](model[0](torch.ones(2, 3))).sum().backward()
    optimizer.step()


def closed(model: nn.Module, _: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> float:
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        return loss.item()

    model(torch.ones(2, 3))
    optimizer.step(closure)


def only_closed(model: nn.Module, _: nn.Module, __: torch.optim.Optimizer) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> Tensor:
        loss: Tensor = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def twice(model: nn.Module, _: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.step()
    comgra.step()


def by_hand(model: nn.Module, _: nn.Module, __: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    comgra.step()


def with_object(model: Any, _: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.forward = lambda _graph: model[0](torch.ones(2, 3))
    model(Graph()).sum().backward()
    optimizer.step()


REFUSED = {
    several: r"several models \(Sequential and Linear\).* Make them modules of one model",
    parts: "calls parts of Sequential separately. Call them in the `forward` of one module",
    closed: r"calls the model itself \(`optimizer.step\(closure\)`\)",
    only_closed: r"calls the model itself \(`optimizer.step\(closure\)`\)",
    twice: "more than one optimizer step. Use one optimizer",
    by_hand: "no torch optimizer ends the step",
    with_object: "calls.0.args.0 contains an object of the class Graph",
}


@pytest.mark.parametrize("program", REFUSED)
def test_what_cannot_be_replayed_is_refused_with_the_reason(
    program: Callable[..., None], tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with comgra.trace(REPLAYED, root=tmp_path) as session:
        for _ in range(2):
            optimizer.zero_grad()
            program(model, other, optimizer)
    run = comgra.open_run(session.path or "")
    step = int(run.checkpoints[-1])
    with pytest.raises(ReplayError, match=f"step {step} cannot be replayed: .*{REFUSED[program]}"):
        comgra.replay(run, step, model=model, optimizer=optimizer, loss=torch.sum)
    warnings = [w for w in run.report["warnings"] if "replay" in w]
    assert len(warnings) == 1, warnings


def test_compiled_programs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = iter([False])  # before the session, and not any more
    name = "comgra_decl.hooks.probing.replays.anything_compiled"
    monkeypatch.setattr(name, lambda: next(compiled, True))
    with recording({**EVERYTHING, "checkpoints": {"replay": True}}) as found:
        train(2)
    assert found.faults == []
    (warning,) = [w for w in found.report["warnings"] if "checkpoints" in w]
    assert "Record the run without torch.compile" in warning


def test_requests_that_make_no_sense_are_refused(
    recorded: tuple[Run, list[dict[str, Tensor]]], tmp_path: Path
) -> None:
    run, _ = recorded
    with pytest.raises(UnknownNameError, match="step 3 was not recorded"):
        played(run, 3)
    with pytest.raises(ReplayError, match=r"nothing to replay at step 3.* replay: \{steps: 4\}"):
        played(run, 0, steps=4)
    with pytest.raises(ReplayError, match=r"pass either loss, .* or train_step"):
        played(run, 0, train_step=print)
    with pytest.raises(ReplayError, match="steps must be a whole number of at least 1, got 0"):
        played(run, 0, steps=0)
    with pytest.raises(ReplayError, match=r"there is no 'lrr'; did you mean 'lr'\?"):
        played(run, 0, change={"lrr": 1})
    with pytest.raises(ReplayError, match="there is no sample 8; the batch has 8 samples"):
        played(run, 0, change={"without": [8]})
    with pytest.raises(ReplayError, match="no sample is left"):
        played(run, 0, change={"without": [*range(8)]})
    with pytest.raises(ReplayError, match="did you mean 'first'"):
        played(run, 0, change={"freeze": "frist"})
    with pytest.raises(ReplayError, match="no parameter of the model is left to train"):
        played(run, 0, change={"freeze": "**"})
    with pytest.raises(ReplayError, match=r"change must map .*, got \['lr'\]"):
        played(run, 0, change=["lr"])
    with pytest.raises(ReplayError, match="the keys are without, clip, lr, freeze"):
        played(run, 0, change={"momentum": 1})
    with pytest.raises(ReplayError, match=r"step must be one of `run.checkpoints`, got '0'"):
        played(run, "0")  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match="must take one optimizer step, but took 0"):
        played(run, 0, loss=None, train_step=lambda *_: None)
    model, _ = made()
    few = torch.optim.AdamW(model.head.parameters())
    with pytest.raises(ReplayError, match="2 parameters in 1 groups, but that of the run has"):
        comgra.replay(run, 0, model=model, optimizer=few, loss=F.cross_entropy)
    with comgra.trace({**SPEC, "checkpoints": {}}, root=tmp_path) as session:
        train(1)
    with pytest.raises(ReplayError, match=r"replay: true\}` in its spec$"):
        played(comgra.open_run(session.path or ""), 0)


def test_an_optimizer_of_another_kind_or_order_is_refused(
    recorded: tuple[Run, list[dict[str, Tensor]]],
) -> None:
    run, _ = recorded
    model, _ = made()
    parameters, optim = [*model.parameters()], torch.optim
    others = {
        "class AdamW, as in the run, got SGD": optim.SGD(parameters),
        "class AdamW, as in the run, got Adam": optim.Adam(parameters),
        "parameter 0 .* must be 'first.weight', .* is 'head.bias'": optim.AdamW(parameters[::-1]),
        "parameter 0 .* is none of the model's": optim.AdamW(made()[0].parameters()),
    }
    for message, optimizer in others.items():
        with pytest.raises(ReplayError, match=message):
            comgra.replay(run, 0, model=model, optimizer=optimizer, loss=F.cross_entropy)


def test_a_train_step_with_two_optimizer_steps_is_refused(
    recorded: tuple[Run, list[dict[str, Tensor]]],
) -> None:
    run, _ = recorded

    def twice(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(*batch.args, **batch.kwargs), batch.target).backward()
            optimizer.step()

    with pytest.raises(ReplayError, match="must take one optimizer step, but took 2"):
        played(run, 0, loss=None, train_step=twice)


class Decayed(torch.optim.SGD):
    """Calls the step of its base class, which has hooks of its own."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.9
        return super().step(closure)


def test_an_optimizer_that_calls_another_step_within_its_own_takes_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = Decayed(model.parameters(), lr=0.1)
    with comgra.trace(REPLAYED, root=tmp_path) as session:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    expected = copy.deepcopy(model.state_dict())
    run, loss = comgra.open_run(session.path or ""), lambda output: output.square().sum()
    comgra.replay(run, 1, model=model, optimizer=optimizer, loss=loss)
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("evaluating", [False, True])
def test_a_call_without_gradients_is_repeated_exactly_or_refused(
    evaluating: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        with torch.no_grad():
            soft = model.train(not evaluating)(x).softmax(-1)
        optimizer.zero_grad()
        F.cross_entropy(model.train()(x), soft).backward()
        optimizer.step()

    with comgra.trace(REPLAYED, root=tmp_path) as session:
        for _ in range(2):
            step(model, optimizer, torch.randn(6, 3))
    expected = copy.deepcopy(model.state_dict())
    run = comgra.open_run(session.path or "")

    def again() -> None:
        def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
            step(model, optimizer, *batch.args)

        comgra.replay(run, 1, model=model, optimizer=optimizer, train_step=train_step)

    if evaluating:
        again()
        torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
    else:
        with pytest.raises(ReplayError, match=r"without gradients before .* draws random numbers"):
            again()


def test_they_stay_within_the_disk_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = made()
    size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    budget = {"budget": {"disk": f"{3 * size}B"}, "steps": [*range(10)]}
    monkeypatch.setattr(Meter, "disk_bytes", 0.0, raising=False)
    spec = {**EVERYTHING, "schedule": budget, "checkpoints": {"every": 1, "replay": True}}
    with recording(spec) as found:
        train(3)
    assert {s.info.type for s in found.steps} == {"train"}  # the batch and Adam's state come on top
    assert any("more than half of the" in w for w in found.report["warnings"])


def test_a_step_that_a_scaler_skips_is_skipped_again(tmp_path: Path) -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(*batch.args), batch.target)).backward()
        scaler.step(optimizer)
        scaler.update()

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    with comgra.trace(REPLAYED, root=tmp_path) as session:
        for size in (torch.inf, 1.0):
            train_step(model, optimizer, Batch((torch.ones(4, 3) * size,), {}, (torch.ones(4, 1),)))
    run = comgra.open_run(session.path or "")
    own = torch.optim.SGD(model.parameters(), lr=7.0)
    again = comgra.replay(run, 0, model=model, optimizer=own, train_step=train_step, scaler=scaler)
    assert again.steps.tolist() == [0]
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert scaler.get_scale() == 4.0
    comgra.replay(run, 1, model=model, optimizer=own, train_step=train_step, scaler=scaler)
    assert not all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_an_input_is_no_target(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 3)
    with comgra.trace(REPLAYED, root=tmp_path) as session:
        F.mse_loss(model(x), x).backward()
        optimizer.step()
    after = copy.deepcopy(model.state_dict())
    run = comgra.open_run(session.path or "")
    own: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with pytest.raises(ReplayError, match=r"with the output and 0 recorded targets \(missing"):
        comgra.replay(run, 0, **own, loss=F.mse_loss)

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(*batch.args), batch.args[0]).backward()
        optimizer.step()

    comgra.replay(run, 0, **own, train_step=train_step)
    assert all(torch.equal(t, after[n]) for n, t in model.state_dict().items())


def test_steps_without_room_on_disk_extend_no_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meter, "disk_bytes", 0.0, raising=False)
    schedule = {"budget": {"disk": "26500B"}, "first": 1, "every": 10}
    replay = {"every": 1, "replay": {"steps": 3}}
    with recording({**EVERYTHING, "schedule": schedule, "checkpoints": replay}) as found:
        train(40)
    assert [s.info.step for s in found.steps if s.info.type == "replay"] == [0]
    steps = [s.info.step for s in found.steps if s.info.type == "train"]
    assert steps == [0, 1, 2, 10, 20, 30]  # step 1 did not fit, when 2 was already planned


def test_compare_shows_a_changed_replay_beside_the_run(
    recorded: tuple[Run, list[dict[str, Tensor]]], tmp_path: Path
) -> None:
    run, _ = recorded
    copy_run(run.path, tmp_path / "real")
    played(run, 4)[0].save(tmp_path / "same")
    played(run, 4, change={"without": [0]})[0].save(tmp_path / "changed")
    catalogue = Catalogue(tmp_path)
    catalogue.refresh()
    view = catalogue.open("real")
    for name, equal in (("same", True), ("changed", False)):
        again = comgra.open_run(tmp_path / name)
        differing = compared = 0
        row: Any
        for row in again.slots.itertuples():
            if row.kind in ("loss", "target", "input"):
                continue
            of = row[list(again.slots.columns).index("pass") + 1]
            tensor = Selection(
                node=row.node, role=row.role, iteration=row.iteration, step=4, statistic="std"
            )
            where = resolve(view, tensor, {})
            other = other_of(catalogue, view, where, run=name, step=None)
            assert (other.run, other.step) == (name, 4)
            pair = dict(statistics_of(view, slot_of(view, where, of), other, where))["std"]
            wanted = [
                r.slot(row.node, role=row.role, of=of, iteration=row.iteration).series("std")[4]
                for r in (run, again)
            ]
            assert (pair.here, pair.there) == pytest.approx(tuple(wanted), nan_ok=True)
            differing += pair.here != pair.there
            compared += 1
        assert compared > 20
        assert (differing == 0) == equal
