"""When comgra records, and what it stores besides tensors, in comgra_decl (R16 to R29)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import comgra_decl as comgra
from tests.replaced.nets import ALL, WEIGHTS, Net, classify, told
from tests.support.traced import roles, traced, train


def test_r16_each_type_has_a_frequency_of_its_own(tmp_path: Path) -> None:
    schedule = {"first": 0, "every": None, "types": {"long": {"every": 2}, "short": {"every": 4}}}
    training = told(16, lambda step: comgra.tag("long" if step % 2 else "short"))
    run = traced(tmp_path, ALL, training, schedule=schedule)
    by_type = {t: g.step.tolist() for t, g in run.records.groupby("type")}
    assert by_type == {"long": [1, 5, 9, 13], "short": [0, 8]}


def test_r16_records_become_rarer(tmp_path: Path) -> None:
    training = told(40)
    run = traced(tmp_path, ALL, training, schedule={"first": 0, "every": 1, "backoff": 2.0})
    assert run.steps.tolist() == [0, 1, 3, 7, 15, 31]


def test_r17_steps_can_be_listed(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL, told(9), schedule={"steps": [1, 4, 7]})
    assert run.steps.tolist() == [1, 4, 7]


def test_r18_a_step_has_a_type_and_further_tags_of_any_text(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL, told(2, lambda step: comgra.tag(f"länge {step}", "a b")))
    assert run.types == ["länge 0", "länge 1"]
    assert run.tags == ["a b"]
    assert run.series("Linear", type="a b").index.tolist() == [0, 1]


def test_r19_evaluation_is_a_mode_of_its_own(tmp_path: Path) -> None:
    def training() -> None:
        net = Net()
        classify(net, steps=2)
        net.eval()
        with torch.no_grad():
            net(torch.randn(7, 4))

    run = traced(tmp_path, ALL, training)
    assert run.records["mode"].tolist() == ["train", "train", "eval"]
    assert len(run.series("head", type="eval")) == 1


def test_r20_it_can_be_decided_after_the_step(tmp_path: Path) -> None:
    def training() -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(40):
            x = torch.ones(2, 3) * (float("nan") if step == 30 else 1.0)
            loss = model(x).sum()
            optimizer.zero_grad()
            if step != 30:
                loss.backward()
            else:
                (loss * 0 + 1.0).backward()
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()

    run = traced(
        tmp_path,
        ALL,
        training,
        schedule={"steps": [0]},
        keep={"ring": 3, "when": ["nonfinite"]},
    )
    assert run.steps.tolist() == [0, 27, 28, 29, 30]


def test_r20_samples_are_taken_evenly_from_categories(tmp_path: Path) -> None:
    def training() -> None:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        targets = torch.tensor([0] * 8 + [1, 2])
        F.cross_entropy(net(torch.randn(10, 4)), targets).backward()
        optimizer.step()

    run = traced(tmp_path, ALL, training, samples={"count": 3, "by": "target"})
    assert sorted(run.slot("head").row(0).attrs["batch_index"]) == [0, 8, 9]


def test_r21_a_type_that_comes_late_needs_no_announcement(tmp_path: Path) -> None:
    training = told(30, lambda step: comgra.tag("rare") if step in (10, 20) else None)
    run = traced(tmp_path, ALL, training, schedule={"first": 1, "every": 100})
    assert "rare" in run.types


def test_r22_the_number_of_samples_is_bounded(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL, lambda: classify(Net(), batch=9), samples={"count": 2})
    assert run.value("head", 0).shape == (2, 3)
    assert run.slot("head").row(0).attrs["batch_index"] == [0, 1]


def test_r23_curves_keep_every_point(tmp_path: Path) -> None:
    training = told(100, lambda step: comgra.kpi("accuracy", step / 7))
    run = traced(tmp_path, ALL, training, schedule={"steps": [0]})
    kpis = run.kpis()
    accuracy = kpis[kpis.name == "accuracy"]
    assert accuracy.step.tolist() == list(range(100))
    assert accuracy.value.tolist() == [step / 7 for step in range(100)]
    assert len(kpis[kpis.name == "loss"]) == 100


def test_r24_notes_are_kept(tmp_path: Path) -> None:
    def say(step: int) -> None:
        if step % 40 == 0:
            comgra.note(f"step {step}: all is well")

    run = traced(tmp_path, ALL, told(100, say), schedule={"steps": [0]})
    assert run.notes().step.tolist() == [0, 40, 80]
    assert run.notes().text[1] == "step 40: all is well"


def test_r25_parameters_are_grouped_by_the_tree_of_modules(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL | WEIGHTS, lambda: classify(Net()))
    assert roles(run, "blocks.0.inner")[:2] == ["weight", "bias"]
    (head,) = [m for m in run.modules if m["path"] == "head"]
    assert head["parameters"]["weight"]["count"] == 12


def test_r26_one_switch_turns_everything_off(tmp_path: Path) -> None:
    with comgra.trace("off", root=tmp_path) as session:
        classify(Net())
    assert session.path is None
    assert list(tmp_path.iterdir()) == []


def test_r27_values_keep_their_type(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).to(torch.bfloat16)
    run = traced(tmp_path, ALL, lambda: train(model, torch.ones(4, 3, dtype=torch.bfloat16)))
    assert str(run.value("Linear", 0).dtype) == "bfloat16"


def test_r28_what_recording_cost_is_in_the_record(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL, lambda: classify(Net(), steps=2))
    assert (run.records.cost > 0).all()


def test_r29_a_run_is_read_as_tables(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL, lambda: classify(Net(), steps=3))
    assert run.series("head", "std").index.tolist() == [0, 1, 2]
    assert run.row(2).shape[0] == len(run.slots)
    assert run.heat("std").index.tolist() == [0, 1, 2]
