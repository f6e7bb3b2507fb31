"""Checkpoints: the models of recorded steps, from which a call can be repeated bit by bit."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import UnknownNameError
from comgra_decl.hooks.schedule.budget import Meter
from comgra_decl.query import Run
from comgra_decl.records import CHECKPOINT, PROBE_MODE
from comgra_decl.store.compaction import compact
from comgra_decl.store.copying import copy_run
from comgra_decl.store.verify import verify
from comgra_decl.viewer.model.runview import RunView
from tests.probing.nets import train as train_net
from tests.support.programs import python
from tests.support.recording import EVERYTHING, contents, recording

PROGRAM = '''
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    """Tied weights, buffers of all kinds, two dtypes, and an empty parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.coarse = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.tensor([True, False, True, True, True, True]))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, tokens):
        self.calls += 1
        x = self.norm(self.embed(tokens).mean(1)) * self.mask + self.calls
        return self.head(self.coarse(x.bfloat16()).float())

def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(11, (8, 5), generator=generator)
    return tokens, torch.randint(11, (8,), generator=generator)
'''
exec(compile(PROGRAM, "program", "exec"))
Net: type[nn.Module] = globals()["Net"]
batch: Any = globals()["batch"]

SPEC: dict[str, Any] = {
    "nodes": {"all": {"select": "**", "capture": ["output", "output_grad"], "values": True}},
    "schedule": {"first": 100},
    "checkpoints": {"first": 1, "every": 4},
    "rules": "off",
    "perturbations": False,
}


def train(steps: int, *, model: nn.Module | None = None, first: int = 0) -> list[dict[str, Tensor]]:
    """Train, and return copies of the parameters and buffers at the beginning of each step."""
    torch.manual_seed(0)
    model = model or Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    states = []
    for step in range(first, first + steps):
        tokens, labels = batch(step)
        state = {**model.state_dict(), **dict(model.named_buffers())}
        states.append({name: tensor.detach().clone() for name, tensor in state.items()})
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
    return states


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Tensor]]]:
    with comgra.trace(SPEC, root=tmp_path_factory.mktemp("runs")) as session:
        states = train(10)
    assert isinstance(session.path, Path)
    return session.path, states


def same(array: np.ndarray[Any, Any], tensor: Tensor) -> bool:
    """Return whether an array and a tensor agree in shape, dtype and every bit."""
    bits = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
    named = str(tensor.dtype).removeprefix("torch.") == array.dtype.name
    return named and array.shape == tuple(tensor.shape) and array.tobytes() == bits.tobytes()


def check(run: Run, states: list[dict[str, Tensor]], steps: list[int]) -> None:
    assert run.checkpoints.tolist() == steps
    for step in steps:
        found = run.checkpoint(step)
        temporary = found.temporary
        assert [*found] == [*Net().state_dict()]
        assert [*temporary] == ["calls"]
        assert {
            name for name, t in states[step].items() if not same({**found, **temporary}[name], t)
        } == set()


def test_a_checkpoint_contains_every_bit_of_the_step_before_its_forward(
    recorded: tuple[Path, list[dict[str, Tensor]]],
) -> None:
    path, states = recorded
    run = comgra.open_run(path)
    check(run, states, [0, 4, 8])
    assert run.steps.tolist() == [*range(10)]
    assert run.types == ["train", CHECKPOINT]
    found = run.checkpoint(4)
    assert (found.step, found.model, len(found)) == (4, "Net", len(Net().state_dict()))
    assert "coarse.weight" in found
    assert "calls" not in found
    tensors = found.torch()
    assert tensors["coarse.weight"].dtype is torch.bfloat16
    assert tensors["head.weight"] is tensors["embed.weight"]
    model = Net()
    model.load_state_dict(tensors)
    assert all(torch.equal(t, states[4][n]) for n, t in model.state_dict().items())
    tensors["mask"].zero_()  # a copy of its own
    assert same(found["mask"], states[4]["mask"])
    stored = run.slots[run.slots["pass"] == CHECKPOINT]
    assert list(stored["role"]).count("embed.weight") == 1  # tied weights are stored once
    assert "head.weight" not in set(stored["role"])


def test_the_viewer_offers_neither_their_type_nor_their_tensors(
    recorded: tuple[Path, list[dict[str, Tensor]]],
) -> None:
    view = RunView(comgra.open_run(recorded[0]))
    assert view.types() == [""]
    assert view.roles("Net") == ["output"]
    assert view.gradient_passes() == ["grad"]


@pytest.mark.slow
def test_a_look_in_a_new_process_repeats_the_recorded_step_bit_by_bit(
    recorded: tuple[Path, list[dict[str, Tensor]]], tmp_path: Path
) -> None:
    code = (
        PROGRAM
        + f"""
import numpy as np, comgra_decl as comgra
run = comgra.open_run({str(recorded[0])!r})
compared = 0
for step in run.checkpoints.tolist():
    tokens, labels = batch(step)
    spec = {{"nodes": {SPEC["nodes"]!r}}}
    loss = lambda output: F.cross_entropy(output, labels)
    found = comgra.look(Net(), tokens, weights=run.checkpoint(step), loss=loss, spec=spec)
    assert found.step == step and found.steps.tolist() == [step], found.steps
    for node in ("embed", "norm", "coarse", "head", "Net"):
        for of in ("forward", "grad"):
            now, then = (r.slot(node, of=of).value(step) for r in (found, run))
            assert now.dtype == then.dtype and now.tobytes() == then.tobytes(), (step, node, of)
            compared += now.size > 0
assert compared == 30, compared
"""
    )
    done = python(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr


def test_copies_and_compacted_runs_keep_them(
    recorded: tuple[Path, list[dict[str, Tensor]]], tmp_path: Path
) -> None:
    path, states = recorded
    copied = copy_run(path, tmp_path / "copy")
    compact(tmp_path / "copy")
    assert verify(copied).damages == []
    check(comgra.open_run(copied), states, [0, 4, 8])


def test_a_resumed_run_has_those_of_both_sessions(tmp_path: Path) -> None:
    model = Net()
    with comgra.trace(SPEC, root=tmp_path, name="run", group="g") as session:
        train(6, model=model)
    assert isinstance(session.path, Path)
    again = {**SPEC, "run": {"resume": str(session.path), "resume_step": 4}}
    with comgra.trace(again):
        states = train(6, model=model, first=4)
    run = comgra.open_run(session.path)
    assert run.checkpoints.tolist() == [0, 4, 8]
    for step in (4, 8):  # step 4 was repeated with other weights
        found = run.checkpoint(step)
        assert all(same(found[name], states[step - 4][name]) for name in found)


@pytest.mark.parametrize("name", ["conv", "reparametrised"])
def test_training_and_all_other_records_are_the_same_to_the_last_bit(name: str) -> None:
    plain = train_net(name).state()
    with recording(EVERYTHING) as bare:
        without = train_net(name)
    with recording({**EVERYTHING, "checkpoints": {"first": 2, "every": 2}}) as found:
        result = train_net(name)
    assert found.faults == []
    assert result.state() == plain == without.state()
    assert result.seen == without.seen
    own = [s for s in found.steps if s.info.mode == PROBE_MODE]
    assert [s.info.step for s in own] == [0, 1, 2, 4]
    others = [i for i, s in enumerate(found.steps) if s.info.mode != PROBE_MODE]
    assert [contents(found, i) for i in others] == [
        contents(bare, i) for i in range(len(bare.steps))
    ]
    assert [found.steps[i].info.structure for i in others] == [s.info.structure for s in bare.steps]


def test_only_their_own_steps_read_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from comgra_decl.hooks.probing import checkpoints

    read: list[str] = []
    original = checkpoints.Checkpoints._read

    def counted(self: Any, node: str, name: str, *rest: Any, **named: Any) -> None:
        read.append(name)
        original(self, node, name, *rest, **named)

    monkeypatch.setattr(checkpoints.Checkpoints, "_read", counted)
    with recording({**EVERYTHING, "checkpoints": {"every": 4}}):
        train(10)
    tensors = len({id(t) for t in (*Net().parameters(), *Net().buffers())})
    assert len(read) == 3 * tensors
    read.clear()
    with recording({**EVERYTHING, "checkpoints": None}):
        train(3)
    assert read == []


def test_the_models_of_a_step_have_a_checkpoint_each(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, inner = nn.Linear(3, 2), nn.Linear(2, 1)
    second = nn.Sequential(inner, nn.Tanh())
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    states = []
    with comgra.trace({**SPEC, "checkpoints": {"every": 2}}, root=tmp_path) as session:
        for _ in range(3):
            states.append([m.weight.detach().clone() for m in (first, inner)])
            for _ in range(2):  # two batches, of which the first one counts
                second(first(torch.randn(4, 3))).sum().backward()
            optimizer.step()
    run = comgra.open_run(session.path or "")
    with pytest.raises(UnknownNameError, match="several models; pass one: 'Linear', 'Sequential'"):
        run.checkpoint(2)
    with pytest.raises(UnknownNameError, match=r"no model 'linear'; it has: 'Linear', 'Seq"):
        run.checkpoint(2, model="linear")
    assert same(run.checkpoint(2, model="Linear")["weight"], states[2][0])
    assert same(run.checkpoint(2, model="Sequential")["0.weight"], states[2][1])


def test_what_there_is_not_is_said(recorded: tuple[Path, list[dict[str, Tensor]]]) -> None:
    run = comgra.open_run(recorded[0])
    with pytest.raises(UnknownNameError, match="step 5 was not recorded with type 'checkpoint'"):
        run.checkpoint(5)
    with pytest.raises(UnknownNameError, match=r"no 'coarse\.wieght'; did you mean 'coarse\.w"):
        run.checkpoint(4)["coarse.wieght"]
    look = comgra.look(nn.Linear(2, 2), torch.ones(1, 2))
    assert look.checkpoints.tolist() == []
    with pytest.raises(UnknownNameError, match=r"declare `checkpoints: \{every: 50\}`"):
        look.checkpoint(0)


class Subclass(Tensor):
    pass


class FullyShardedDataParallel(nn.Linear):
    pass


def with_subclass() -> nn.Module:
    model = nn.Linear(3, 2)
    model.register_buffer("odd", torch.ones(2).as_subclass(Subclass))
    return model


def with_sparse() -> nn.Module:
    model = nn.Linear(3, 2)
    model.register_buffer("few", torch.eye(2).to_sparse())
    return model


def quantized() -> nn.Module:
    """A frozen layer whose weights are packed, before one that is trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch recommends another package
        packed = torch.ao.quantization.quantize_dynamic(
            nn.Sequential(nn.Linear(3, 4)).eval(), {nn.Linear}, dtype=torch.qint8
        )
    return nn.Sequential(packed, Frozen(), nn.Linear(4, 2))


class Frozen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "distributed": (
        lambda: FullyShardedDataParallel(3, 2),
        "the parameters of FullyShardedDataParallel are distributed over processes",
    ),
    "a subclass": (with_subclass, "odd cannot be stored without changing it (Subclass, "),
    "quantized": (quantized, "0.0 keeps its weights in an object of its own, as quantized layers"),
    "sparse": (with_sparse, "few cannot be stored without changing it (Tensor, torch.float32, "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_stored_is_said_at_the_first_step(case: str) -> None:
    make, reason = REFUSED[case]
    with recording({**EVERYTHING, "checkpoints": {"every": 1}}) as found:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
    assert found.faults == []
    assert {s.info.type for s in found.steps} == {"train"}
    (warning,) = [w for w in found.report["warnings"] if "checkpoint" in w]
    assert warning.startswith(f"checkpoints: {reason}")
    assert warning.endswith("The run has no checkpoints from this step on")


def test_one_of_several_processes_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with recording({**EVERYTHING, "checkpoints": {"every": 1}}) as found:
        train(2)
    assert {s.info.type for s in found.steps} == {"train"}
    assert any("several processes train" in w for w in found.report["warnings"])


def test_they_stay_within_the_disk_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(t.numel() * t.element_size() for t in {*Net().parameters(), *Net().buffers()})
    budget = {"budget": {"disk": f"{4 * size}B"}, "steps": [*range(10)]}
    monkeypatch.setattr(Meter, "disk_bytes", 0.0, raising=False)
    with recording({**EVERYTHING, "schedule": budget, "checkpoints": {"every": 1}}) as found:
        train(6)
    own = [s.info.step for s in found.steps if s.info.type == CHECKPOINT]
    assert own == [0, 1, 2]  # each needs at most half of what is left: 4, 3 and 2 times the model
    (warning,) = [w for w in found.report["warnings"] if "checkpoint" in w]
    assert re.search(r"step 3 needs [\d.e+-]+ MB, which is more than half of the", warning)


def test_a_step_that_keep_may_drop_has_none() -> None:
    spec = {"keep": {"ring": 2, "when": ["nonfinite"]}, "schedule": {"steps": [0, 3]}}
    with recording({**EVERYTHING, **spec, "checkpoints": {"every": 1}}) as found:
        train(5)
    assert [s.info.step for s in found.steps if s.info.type == CHECKPOINT] == [0, 3]


AGAIN: dict[str, dict[str, Any]] = {
    "saliency": {"target": "label"},
    "input_x_gradient": {"target": "loss"},
    "guided_backprop": {},
    "grad_cam": {"select": "conv"},
    "guided_grad_cam": {"select": "conv"},
    "integrated_gradients": {"points": 3},
    "occlusion": {"window": [3, 3], "stride": 3},
    "hessian": {"points": 5},
    "loss_slice": {"points": 3},
}


def test_every_picture_made_again_from_a_checkpoint_is_the_recorded_one(tmp_path: Path) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.bn(self.conv(x)).relu().mean((2, 3)))

    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(6, 1, 6, 6), torch.arange(6) % 3
    pictures = {name: {"method": name, **more} for name, more in AGAIN.items()}
    spec = {
        "nodes": {"all": {"select": "**", "capture": ["output"]}},
        "schedule": {"every": 1},
        "samples": {"count": 6},
        "probes": {"eyes": {"samples": {"count": 6}, "schedule": {"every": 1}}},
        "pictures": {name: {"of": "eyes", **each} for name, each in pictures.items()},
        "checkpoints": {"every": 1},
    }
    with comgra.trace(spec, root=tmp_path) as session:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    run = comgra.open_run(session.path or "")
    assert run.report["warnings"] == []
    again = comgra.look(
        model.eval(),
        x,
        weights=run.checkpoint(1),
        pictures=pictures,
        loss=lambda output: F.cross_entropy(output, y),
    )
    for name in pictures:
        wanted, found = run.picture(name, 1), again.picture(name, 1)
        assert wanted.values.tobytes() == found.values.tobytes(), name
        assert wanted.values.any(), name
