"""`python -m benchmarks.probes`: what probes and their pictures cost.

- `passes`: the processor time of each picture of 8 samples, divided by that of the passes that its
  documentation states. They are those of an untraced copy of the model, with the gradients of all
  parameters.
- `between`: how much longer a step takes if a probe is declared but not due.
- `budget`: the share of the time that a probe with pictures takes at every tenth record, with and
  without `budget: {time: "2%"}`.
- `memory`: the memory of the process after 100 records with every picture, and at the end.

Processor times are those of the training thread, with one thread of torch.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.machine import machine_facts
from benchmarks.nets import Gpt, Training, build_mlp, next_token_loss
from benchmarks.store.data import memory
from comgra_decl.hooks.probing.methods import drawn
from comgra_decl.hooks.probing.subject import Drawn

RESULTS = Path(__file__).with_name("results")
PARTS = ("passes", "between", "budget", "memory")
SAMPLES = 8
HEADS = 4
BUDGET = 0.02

EVERY = {"first": 0, "every": 1}

Spec = dict[str, Any]


Further = Callable[[Gpt, Tensor], None]


@dataclass(frozen=True)
class Stated:
    """A picture, and the passes that `docs/pictures.md` states for it.

    Attributes:
        spec: the keys of the picture besides `method` and `of`.
        forward: the number of forward passes.
        backward: the number of backward passes.
        second: the number of second backward passes, through the forward and the backward pass.
        further: what the picture computes besides, for [B, T, D] hidden values.
    """

    spec: Spec
    forward: int
    backward: int
    further: Further | None = None
    second: int = 0


def decode(model: Gpt, hidden: Tensor) -> None:
    """Decode the output of each block."""
    for _ in model.blocks:
        model.head(model.norm(hidden))


def attend(model: Gpt, hidden: Tensor) -> None:
    """Compute each attention and its weights."""
    split = hidden.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    for _ in model.blocks:
        functional.scaled_dot_product_attention(split, split, split, is_causal=True)
        (split @ split.mT).softmax(-1)


CONV = {"select": {"class": "Conv2d"}}

IMAGES = {
    "grad_cam": Stated(CONV, 1, 1),
    "saliency": Stated({}, 1, 1),
    "input_x_gradient": Stated({}, 1, 1),
    "guided_backprop": Stated({}, 1, 1),
    "guided_grad_cam": Stated(CONV, 2, 2),
    "integrated_gradients": Stated({"points": 20}, 21, 20),
    "occlusion": Stated({"window": [12, 12], "stride": 12}, 16, 0),
    "maximise": Stated({"select": "8", "points": 16}, 16, 16),
    "hessian": Stated({"points": 10, "vectors": 1, "top": 1, "lowest": 1}, 1, 1, second=10),
    "loss_slice": Stated({"points": 9}, 9, 0),
}
"""Pictures of `images`, with 48 x 48 pixels."""

WORDS = {
    "attention_rollout": Stated({}, 1, 0, attend),
    "logit_lens": Stated({}, 1, 0, decode),
}
"""Pictures that only a language model has."""


def images(width: int = 32, size: int = 48) -> Training:
    """Return a training of a CNN with batch norm on batches of 8 random images."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for given, made in ((3, width), (width, width), (width, 2 * width)):
        layers += [nn.Conv2d(given, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU()]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)]
    model = nn.Sequential(*layers[:6], nn.MaxPool2d(2), *layers[6:], *end)
    batches = [(torch.randn(SAMPLES, 3, size, size), torch.arange(SAMPLES)) for _ in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Training(model, optimizer, functional.cross_entropy, batches)


def words(width: int = 256, blocks: int = 4) -> Training:
    """Return a training of a small transformer on batches of 8 rows of 64 tokens."""
    torch.manual_seed(0)
    model = Gpt(width=width, blocks=blocks, heads=HEADS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    texts = [torch.randint(0, 128, (SAMPLES, 65)) for _ in range(4)]
    batches = [(text[:, :-1], text[:, 1:]) for text in texts]
    return Training(model, optimizer, next_token_loss, batches)


def probed(pictures: Mapping[str, Stated], **probe: Any) -> Spec:
    """Return a spec that records the head, with these pictures of a probe of 8 samples."""
    return {
        "nodes": {"all": {"select": "*"}},
        "schedule": {"first": 1, "every": 1, "backoff": 1.0},
        "probes": {"eyes": {"samples": {"count": SAMPLES}, **probe}},
        "pictures": {
            name: {"method": name, "of": "eyes", **stated.spec} for name, stated in pictures.items()
        },
    }


@contextmanager
def traced(spec: Spec) -> Iterator[None]:
    """Record into a folder that is removed afterwards.

    Raises:
        RuntimeError: something was not recorded as declared, so that its times mean nothing.
    """
    import comgra_decl

    with tempfile.TemporaryDirectory() as root:
        with comgra_decl.trace(spec, root=root) as session:
            yield
        assert session.path is not None
        run = comgra_decl.open_run(session.path)
        missing = {*spec.get("pictures", {})} - {*run.pictures}
        if missing:
            raise RuntimeError(f"there are no pictures {sorted(missing)}")


# -- passes ----------------------------------------------------------------------------------------


@dataclass
class _Clock:
    """Processor times by name, in seconds."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.seconds.setdefault(name, []).append(time.thread_time() - began)

    def around(self, drawn: Callable[..., Drawn]) -> Callable[..., Drawn]:
        def timed(spec: Any, subject: Any) -> Drawn:
            with self.timed(spec.method):
                return drawn(spec, subject)

        return timed


def passes(rounds: int = 5, steps: int = 3) -> list[dict[str, Any]]:
    """Return the cost of each picture relative to that of its passes.

    The first picture of a step also pays for memory that the others reuse, so each round begins
    with another one.

    Returns:
        For each method: its passes, their processor time and that of the picture in seconds, and
        the ratio of both.
    """
    rows = []
    for training, pictures in ((images(), IMAGES), (words(), WORDS)):
        clock, plain = _Clock(), _Clock()
        for number in range(rounds):
            _add_plain(plain, training, pictures)
            turned = dict(islice(cycle(pictures.items()), number, number + len(pictures)))
            timed = mock.patch("comgra_decl.hooks.probing.probe.drawn", clock.around(drawn))
            with timed, traced(probed(turned, schedule=EVERY)):
                for _ in range(steps):
                    training.step()
        unit = {name: median(each) for name, each in plain.seconds.items()}
        for name, stated in pictures.items():
            expected = stated.forward * unit["forward"] + stated.backward * unit["backward"]
            expected += stated.second * unit.get("second", 0.0) + unit.get(name, 0.0)
            taken = median(clock.seconds[name])
            own = {
                "method": name,
                "forward": stated.forward,
                "backward": stated.backward,
                "second": stated.second,
            }
            rows.append({**own, "expected": expected, "taken": taken, "ratio": taken / expected})
    return rows


def _add_plain(clock: _Clock, training: Training, pictures: Mapping[str, Stated]) -> None:
    """Time passes of an untraced copy of the model in evaluation mode, and what pictures add."""
    model = copy.deepcopy(training.model).eval()
    x, y = training.batches[0]
    for _ in range(4):
        with clock.timed("forward"):
            loss = training.criterion(model(x), y)
        with clock.timed("backward"):
            loss.backward()
    if any(stated.second for stated in pictures.values()):
        _add_second(clock, model, training.criterion(model(x), y))
    for name, stated in pictures.items():
        if stated.further is not None:
            assert isinstance(model, Gpt)
            with torch.no_grad(), clock.timed(name):
                stated.further(model, model.tok(x))


def _add_second(clock: _Clock, model: nn.Module, loss: Tensor) -> None:
    """Time second backward passes: products of the Hessian and a vector."""
    parameters = [*model.parameters()]
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    vector = [torch.randn_like(p) for p in parameters]
    for _ in range(4):
        with clock.timed("second"):
            torch.autograd.grad(gradients, parameters, vector, retain_graph=True)


# -- steps without a probe -------------------------------------------------------------------------


def between(rounds: int = 9, steps: int = 300) -> dict[str, float]:
    """Return the time of a step relative to plain training, with the MLP of the benchmark.

    Returns:
        `again` is plain training once more (the noise); `traced` records the first step only;
        `declared` has a probe and a picture in addition, at the first step.
    """
    training = build_mlp()
    first = {"schedule": {"steps": [0]}}
    saliency = {"saliency": IMAGES["saliency"]}
    kinds: dict[str, Spec | None] = {
        "plain": None,
        "again": None,
        "traced": {"nodes": {"all": {"select": "*"}}, **first},
        "declared": {**probed(saliency, **first), **first},
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, own in kinds.items():
            training.reset()
            if own is None:
                times[kind].append(_step_time(training, steps))
                continue
            with traced(own):
                times[kind].append(_step_time(training, steps))
    return {kind: median(found) / median(times["plain"]) for kind, found in times.items()}


def _step_time(training: Training, steps: int) -> float:
    """Return the median processor time of a step of this thread, after a tenth of them."""
    found = []
    for _ in range(steps):
        began = time.thread_time()
        training.step()
        found.append(time.thread_time() - began)
    return median(found[steps // 10 :])


# -- budgets ---------------------------------------------------------------------------------------


@dataclass
class _Stopwatch:
    """The time that the probe takes in the training thread, in seconds."""

    seconds: float = 0.0
    records: int = 0

    def watching(self) -> mock._patch[Any]:
        from comgra_decl.hooks.probing.probe import Probe

        enter, ended = Probe.enter, Probe.ended

        def entered(probe: Probe, *args: Any, **options: Any) -> None:
            began = time.perf_counter()
            enter(probe, *args, **options)
            self.seconds += time.perf_counter() - began

        def finished(probe: Probe, *args: Any) -> Iterator[Any]:
            began = time.perf_counter()
            records = [*ended(probe, *args)]
            self.seconds += time.perf_counter() - began
            self.records += len(records)
            yield from records

        return mock.patch.multiple(Probe, enter=entered, ended=finished)


def budget(steps: int = 600) -> list[dict[str, Any]]:
    """Return the share of the time of a probe at every tenth record, with and without a budget.

    Times are counted from the second step on, because the first one imports modules.
    """
    rows = []
    cam, lens = {"grad_cam": IMAGES["grad_cam"]}, {"logit_lens": WORDS["logit_lens"]}
    for name, training, pictures in (("images", images(), cam), ("words", words(), lens)):
        for limit in (None, f"{BUDGET:.0%}"):
            schedule: Spec = {"first": 0, "every": 10}
            if limit is not None:
                schedule["budget"] = {"time": limit}
            watch = _Stopwatch()
            with watch.watching(), traced(probed(pictures, schedule=schedule)):
                training.step()
                watch.seconds, began = 0.0, time.perf_counter()
                for _ in range(steps):
                    training.step()
                whole = time.perf_counter() - began
            own = {"net": name, "picture": next(iter(pictures)), "budget": limit}
            rows.append({**own, "share": watch.seconds / whole, "records": watch.records})
    return rows


# -- memory ----------------------------------------------------------------------------------------


def used_memory(records: int = 1000) -> list[dict[str, float]]:
    """Return the memory of the process in MB after each tenth of the records."""
    training = images(width=4, size=8)
    small = {"occlusion": Stated({"window": [4, 4], "stride": 4}, 4, 0)}
    points = {
        name: Stated({**IMAGES[name].spec, "points": 3}, 0, 0)
        for name in ("integrated_gradients", "maximise", "hessian", "loss_slice")
    }
    rows = []
    with traced(probed({**IMAGES, **small, **points}, schedule=EVERY)):
        for record in range(1, records + 1):
            training.step()
            if record % (records // 10) == 0:
                gc.collect()
                rows.append({"records": record, "mb": memory("VmRSS")})
    return rows


# -- the command -----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the measurements requested on the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.probes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--records", type=int, default=1000, help="of the part `memory`")
    parser.add_argument("--save", action="store_true", help="write results/probes-DATE.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    own: dict[str, Callable[[], Any]] = {
        "passes": lambda: passes(options.rounds),
        "between": lambda: between(options.rounds),
        "budget": budget,
        "memory": lambda: used_memory(options.records),
    }
    found: dict[str, Any] = {}
    for part in options.parts:
        found[part] = own[part]()
        print(part, json.dumps(found[part], indent=1), sep="\n", flush=True)
    if options.save:
        today = time.strftime("%Y-%m-%d")
        content = {"date": today, "machine": machine_facts(), **found}
        (RESULTS / f"probes-{today}.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
