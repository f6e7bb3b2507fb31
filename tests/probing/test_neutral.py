"""A probe changes nothing in training, and nothing that tracing records."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from comgra_decl.hooks.probing.copying import CleanCopy
from comgra_decl.records import PICTURE_PREFIX, PROBE_MODE
from tests.probing.nets import MODELS, Trained, train
from tests.support.recording import EVERYTHING, Recording, contents, recording
from tests.support.shortened import combined

PICTURES: dict[str, dict[str, Any]] = {
    "saliency": {"method": "saliency", "of": "eyes", "target": "label"},
    "times": {"method": "input_x_gradient", "of": "eyes"},
    "line": {"method": "integrated_gradients", "of": "eyes", "points": 2},
    "bend": {"method": "hessian", "of": "eyes", "points": 3},
    "dream": {"method": "maximise", "of": "eyes", "select": "**", "points": 2, "units": [0]},
    "slice": {"method": "loss_slice", "of": "eyes", "points": 3},
}
OF_IMAGES: dict[str, dict[str, Any]] = {
    "cam": {"method": "grad_cam", "of": "eyes", "select": {"class": "Conv2d"}, "target": "loss"},
    "guided": {"method": "guided_backprop", "of": "eyes"},
    "both": {"method": "guided_grad_cam", "of": "eyes", "select": {"class": "Conv2d"}},
    "hide": {"method": "occlusion", "of": "eyes", "window": [4, 4], "stride": 4},
}
OF_TOKENS: dict[str, dict[str, Any]] = {
    "hide": {"method": "occlusion", "of": "eyes", "window": [1]},
    "read": {"method": "attention_rollout", "of": "eyes"},
    "lens": {"method": "logit_lens", "of": "eyes", "select": "embed", "head": "head"},
}
PICTURES_OF = {
    "conv": OF_IMAGES,
    "recurrent": OF_TOKENS,
    "transformer": OF_TOKENS,
    "tied": OF_TOKENS,
    "reparametrised": {},
}
"""Those that a model has besides `PICTURES`; what does not fit it is refused in the middle."""


def probes(mode: str = "eval", name: str = "conv", **spec: Any) -> dict[str, Any]:
    eyes = {"samples": {"count": 4}, "mode": mode, "schedule": {"first": 2, "every": 2}, **spec}
    return {"probes": {"eyes": eyes}, "pictures": {**PICTURES, **PICTURES_OF[name]}}


def traced(name: str, **spec: Any) -> tuple[Trained, Recording]:
    with recording({**EVERYTHING, **spec}) as found:
        result = train(name)
    assert found.faults == []
    return result, found


@pytest.mark.parametrize(
    ("name", "mode"), combined([*MODELS], ["eval", "train", "as_is"], rounds=1)
)
def test_training_and_all_other_records_are_the_same_to_the_last_bit(name: str, mode: str) -> None:
    plain = train(name).state()
    without, bare = traced(name)
    with_probes, found = traced(name, **probes(mode, name))
    assert with_probes.state() == plain == without.state()
    assert with_probes.seen == without.seen

    others = [s for s in found.steps if s.info.mode != PROBE_MODE]
    assert len(found.steps) - len(others) == 4  # of steps 0, 1, 2 and 4
    slots = {k: i for k, i in found.slots.items() if not k.pass_.startswith(PICTURE_PREFIX)}
    assert {k: (i.kind, i.shape, i.dtype) for k, i in slots.items()} == {
        k: (i.kind, i.shape, i.dtype) for k, i in bare.slots.items()
    }
    hashes = [s.info.structure for s in others]
    assert hashes == [s.info.structure for s in bare.steps]
    for at, step in enumerate(bare.steps):
        place = next(i for i, s in enumerate(found.steps) if s is others[at])
        assert contents(found, place) == contents(bare, at)
        assert (step.info.step, step.info.type) == (others[at].info.step, others[at].info.type)


def test_an_error_in_the_copy_ends_the_probe_but_neither_tracing_nor_training() -> None:
    calls = 0

    def fails(*_: Any, **__: Any) -> Any:
        nonlocal calls
        calls += 1
        raise RuntimeError("no such kernel")

    with patch.object(CleanCopy, "run", fails):
        result, found = traced("conv", **probes())
    assert result.state() == train("conv").state()
    assert [s.info.type for s in found.steps] == ["train"] * 5
    assert calls == 1
    (warning,) = found.report["warnings"]
    assert "the copy of the model failed (RuntimeError: no such kernel)" in warning


METHODS: dict[str, dict[str, Any]] = {
    "saliency": {},
    "input_x_gradient": {},
    "guided_backprop": {},
    "grad_cam": {"select": {"class": "Conv2d"}},
    "guided_grad_cam": {"select": {"class": "Conv2d"}},
    "integrated_gradients": {"points": 2},
    "occlusion": {"window": [4, 4], "stride": 4},
    "maximise": {"select": "conv2", "points": 3, "units": [0]},
    "hessian": {"points": 3},
    "loss_slice": {"points": 3},
    "attention_rollout": {},
    "logit_lens": {"select": "embed", "head": "head"},
    "captum": {"method": {"_target_": "captum.attr.IntegratedGradients", "n_steps": 3}},
}
FORWARD = ("occlusion", "loss_slice", "attention_rollout", "logit_lens")
"""Methods without a backward pass, which fail in a forward pass, the others in a backward pass."""

MODEL_OF = {"attention_rollout": "transformer", "logit_lens": "tied"}
"""The models of methods that need another one than `conv`; they take one pass."""


@pytest.mark.parametrize(
    ("method", "calls"),
    [(name, calls) for name in METHODS for calls in (0, 1) if not (calls and name in MODEL_OF)],
)
def test_an_error_in_the_middle_of_a_method_leaves_the_training_untouched(
    method: str, calls: int
) -> None:
    if method == "captum":
        pytest.importorskip("captum.attr")
    place, name = (CleanCopy, "run") if method in FORWARD else (torch.autograd, "grad")
    model = MODEL_OF.get(method, "conv")
    # the first pass of a copy is that of the record
    succeeding = calls + (method in FORWARD)
    original, count = getattr(place, name), 0

    def fails(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        result = original(*args, **options)
        if count == succeeding + 1:
            raise RuntimeError("no such kernel")
        return result

    picture = {"it": {"method": method, "of": "eyes", **METHODS[method]}}
    eyes = {"samples": {"count": 4}, "mode": "train", "schedule": {"every": 2}}
    with patch.object(place, name, fails):
        result, found = traced(model, probes={"eyes": eyes}, pictures=picture)
    assert count > succeeding
    assert result.state() == train(model).state()
    assert len(found.of("probe:eyes")) == 3
    first, *later = [text for text in found.report["warnings"] if "no picture" in text]
    assert "no such kernel" in first
    assert not later or method == "logit_lens"  # which does not fit the model otherwise


def calls_of_probing(**spec: Any) -> int:
    """Count the calls to functions in this package during a traced training run."""
    count = 0

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        if event == "call":
            count += "/hooks/probing/" in frame.f_code.co_filename

    with recording({**EVERYTHING, **spec}):
        sys.setprofile(see)
        try:
            train("conv")
        finally:
            sys.setprofile(None)
    return count


def test_without_probes_none_of_their_code_is_called() -> None:
    assert calls_of_probing() == 0
    assert calls_of_probing(**probes()) > 100


def test_a_copy_is_freed_when_it_is_closed_and_not_when_python_looks_for_cycles() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    gc.collect()
    gc.disable()
    try:
        copy = CleanCopy(model, {})
        copy.run((torch.ones(2, 3),), {})
        parts = [weakref.ref(part) for part in copy.module.modules()]
        copy.close()
        assert [part() for part in parts] == [None] * 3
    finally:
        gc.enable()


def test_memory_stays_flat_over_many_records() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counts: list[int] = []
    spec = probes(schedule={"first": 1000})
    with recording({**EVERYTHING, **spec, "pictures": {"s": PICTURES["saliency"]}}) as found:
        for step in range(30):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(8, 1, 8, 8)), torch.randint(3, (8,))).backward()
            optimizer.step()
            found.steps.clear()
            if step % 10 == 9:
                gc.collect()
                counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    assert counts[1] == counts[2]


GROWING = """
import ctypes, gc, json, sys
import torch
from torch import nn
from torch.nn import functional as F
import comgra_decl
from tests.probing.test_neutral import OF_IMAGES, PICTURES

RECORDS, EVERY = 1000, 100
cover = {"method": "occlusion", "of": "eyes", "window": [16, 16], "stride": 16}
spec = {
    "nodes": {"all": {"select": "**"}},
    "schedule": {"first": RECORDS},
    "rules": "off",
    "probes": {"eyes": {"samples": {"count": 4}, "schedule": {"first": RECORDS}}},
    "pictures": {**PICTURES, **OF_IMAGES, "hide": cover},
}

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 3)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
found = []
with comgra_decl.trace(spec, root=sys.argv[1]) as session:
    for step in range(1, RECORDS + 1):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.randint(3, (4,))).backward()
        optimizer.step()
        if step % EVERY == 0:
            found.append(resident())
records = comgra_decl.open_run(session.path).records
assert (records["type"] == "probe:eyes").sum() == RECORDS
print(json.dumps(found))
"""


def resident_memory(root: Path) -> list[int]:
    """Return the kB in memory after each 100 of 1,000 records with every picture."""
    done = subprocess.run(
        [sys.executable, "-c", GROWING, str(root)],
        capture_output=True, text=True, check=True,
        env={**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found: list[int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_is_as_large_after_a_thousand_records_as_after_some_hundred(
    tmp_path: Path,
) -> None:
    found = resident_memory(tmp_path)[2:]
    kept = 4 * 3 * 32 * 32 * 4 / 1024  # kB of the samples: the least that a leak would keep
    # A leak grows with every hundred records; a cache or an arena grows once.
    assert median(later - earlier for earlier, later in pairwise(found)) < 0.5 * kept * 100
