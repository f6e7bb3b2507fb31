"""False alarms on healthy training runs: `python -m benchmarks.bugs.healthy`.

Runs small programs in many styles (`benchmarks.bugs.styles`), and trains models of timm,
torchvision and transformers, as their libraries initialize them, for 200 steps on data that can be
learned. Both are recorded with the `debug` preset. All training runs that learn are healthy, so
every error and every warning about them is a false alarm. Those that do not learn are listed and
not counted. Models of libraries need the packages of `make neutrality`.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

_SMALLER = {
    "timm": (
        "mobilenetv2_035",
        "regnetx_002",
        "regnety_002",
        "resnet14t",
        "test_byobnet",
        "test_convnext",
        "test_convnext2",
        "test_convnext3",
        "test_efficientnet",
        "test_efficientnet_evos",
        "test_efficientnet_gn",
        "test_efficientnet_ln",
        "test_mambaout",
        "test_nfnet",
        "test_resnet",
        "test_vit",
        "test_vit2",
        "test_vit3",
        "test_vit4",
        "tinynet_e",
    ),
    "torchvision": (
        "mnasnet0_75",
        "regnet_x_400mf",
        "resnet34",
        "shufflenet_v2_x1_0",
        "squeezenet1_0",
    ),
}
"""Further library models, which are small and come first."""

_SIDE = 32
"""Height and width of images, if a model accepts them."""

STEPS = 200
CLASSES = 5
_BATCH = 16
_STYLES = "styles/"
_LEARNED = 0.7
"""A loss that falls below this share of its start has been learned."""


@dataclass
class Outcome:
    """What the rules found in a healthy training run.

    Attributes:
        name: library and model, or `styles/` and the name of a program.
        first: mean of the first ten losses; for a program, the lowest quality that counts as
            learned.
        last: mean of the last ten losses; for a program, the quality.
        findings: severity, rule and place of each finding that no other one explains.
        failed: why the training could not run; empty if it did.
    """

    name: str
    first: float = math.nan
    last: float = math.nan
    findings: list[tuple[str, str, str]] = field(default_factory=list)
    failed: str = ""

    @property
    def learns(self) -> bool:
        """Whether the loss falls clearly or, for a program, the quality is reached."""
        if self.name.startswith(_STYLES):
            return self.last >= self.first
        return self.last < _LEARNED * self.first

    @property
    def alarms(self) -> list[tuple[str, str, str]]:
        """The false errors and warnings; none where the model does not learn."""
        return [f for f in self.findings if f[0] != "hint"] if self.learns else []


def names() -> Iterator[str]:
    """Yield the names of all training runs whose packages are installed."""
    from benchmarks.bugs.styles import trainings
    from benchmarks.neutrality import zoo

    yield from (f"{_STYLES}{name}" for name in trainings())

    for family in ("timm", "torchvision", "transformers"):
        if zoo.installed(family):
            yield from (f"{family}/{name}" for name in _SMALLER.get(family, ()))
            yield from zoo.names(family)


def train(name: str) -> Outcome:
    """Train a model and return what the rules found."""
    import torch

    import comgra_decl as comgra
    from comgra_decl.rules import diagnose

    torch.set_num_threads(1)
    torch.manual_seed(0)
    outcome = Outcome(name)
    with tempfile.TemporaryDirectory(prefix="healthy-") as root:
        try:
            run = _program(name) if name.startswith(_STYLES) else _of_library(name)
            with comgra.trace("debug", root=root) as session:
                outcome.first, outcome.last = run()
        except Exception as error:  # noqa: BLE001  (a model that does not run says nothing about us)
            outcome.failed = f"{type(error).__name__}: {error}"[:120]
            return outcome
        assert session.path is not None
        found = diagnose(comgra.open_run(session.path)).findings
        outcome.findings = [
            (f.severity, f.rule, str(f.place or "")) for f in found if f.because is None
        ]
    return outcome


def _program(name: str) -> Callable[[], tuple[float, float]]:
    """Return a function that trains a program and returns the required and the reached quality."""
    from benchmarks.bugs.styles import trainings

    training = trainings()[name.removeprefix(_STYLES)]

    def run() -> tuple[float, float]:
        quality, least = training()
        return least, quality

    return run


def _of_library(name: str) -> Callable[[], tuple[float, float]]:
    """Return a function that trains a model and returns the first and the last losses."""
    import torch

    model, loss_of = _training(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def run() -> tuple[float, float]:
        losses = []
        for _ in range(STEPS):
            loss = loss_of()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return sum(losses[:10]) / 10, sum(losses[-10:]) / 10

    return run


def _training(name: str) -> tuple[Any, Callable[[], Any]]:
    """Return a model, and a function that computes its loss on the next batch."""
    family, _, own = name.partition("/")
    return {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}[family](own)


def _timm(name: str) -> tuple[Any, Callable[[], Any]]:
    from benchmarks.neutrality.zoo import timm_nets

    model, size = timm_nets.smallest(name)
    return model, _images(model, 7, _side(model, size))


def _torchvision(name: str) -> tuple[Any, Callable[[], Any]]:
    from benchmarks.neutrality.zoo import vision

    # imported after `vision`, which makes that possible
    models: Any = import_module("torchvision.models")
    options = vision.OPTIONS.get(name, {})
    if name in vision.MAPS or name in vision.VIDEOS or name == "raft_small":
        raise ValueError("no image classifier")
    model = models.get_model(name, weights=None, num_classes=7, **options)
    return model, _images(model, 7, _side(model, vision.SIDE.get(name, 64)))


def _side(model: Any, usual: int) -> int:
    """Return the smallest size of images that a model accepts, but at most the usual one."""
    import torch

    model.eval()
    try:
        with torch.no_grad():
            model(torch.zeros(1, 3, _SIDE, _SIDE))
    except (RuntimeError, AssertionError, ValueError):
        return usual
    return min(_SIDE, usual)


def _transformers(name: str) -> tuple[Any, Callable[[], Any]]:
    import torch

    library: Any = import_module("transformers")  # its types are incomplete
    from benchmarks.neutrality.zoo.tiny import tiny

    library.utils.logging.set_verbosity_error()
    config = tiny(library.AutoConfig.for_model(name))
    config.num_labels = CLASSES
    if type(config) in library.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        model = library.AutoModelForImageClassification.from_config(config)
        side = getattr(config, "image_size", 32)
        return model, _images(model, CLASSES, side if isinstance(side, int) else side[0])
    words = int(config.get_text_config().vocab_size)
    if type(config) in library.MODEL_FOR_CAUSAL_LM_MAPPING:
        model = library.AutoModelForCausalLM.from_config(config)

        def next_words() -> Any:
            first = torch.randint(words, (_BATCH, 1))
            tokens = (first + 3 * torch.arange(12)) % words
            return model(input_ids=tokens, labels=tokens).loss

        return model.train(), next_words
    model = library.AutoModelForSequenceClassification.from_config(config)

    def kind_of_text() -> Any:
        labels = torch.randint(CLASSES, (_BATCH,))
        tokens = torch.randint(5, words, (_BATCH, 12))
        tokens[:, 2:8] = 5 + labels[:, None]
        return model(input_ids=tokens, labels=labels).loss

    return model.train(), kind_of_text


def _images(model: Any, classes: int, side: int) -> Callable[[], Any]:
    """Return the loss on images whose class is a pattern under noise."""
    import torch
    from torch.nn import functional as F

    coarse = torch.randn(classes, 3, 4, 4)
    patterns = F.interpolate(coarse, size=(side, side), mode="bilinear")
    model.train()

    def loss() -> Any:
        labels = torch.randint(classes, (_BATCH,))
        output = model(patterns[labels] + 0.5 * torch.randn(_BATCH, 3, side, side))
        output = getattr(output, "logits", output)
        if isinstance(output, tuple):
            output = output[0]
        return F.cross_entropy(output, labels)

    return loss


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the models requested on the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bugs.healthy", description=__doc__)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit for each training")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the outcomes as JSON")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    outcomes = []
    wanted = [n for n in names() if any(fnmatchcase(n, pattern) for pattern in options.only)]
    for name in wanted:
        outcomes.append(_within(name, options.seconds))
        print(_line(outcomes[-1]), flush=True)
    print(summary(outcomes))
    if options.save is not None:
        options.save.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    return 0


def _within(name: str, seconds: float) -> Outcome:
    """Train in a separate process, which is stopped if it takes too long."""
    context = get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=lambda: there.send(train(name)))
    process.start()
    try:
        return here.recv() if here.poll(seconds) else Outcome(name, failed="took too long")
    except EOFError:
        return Outcome(name, failed="the process ended")
    finally:
        process.kill()
        process.join()


def _line(outcome: Outcome) -> str:
    if outcome.failed:
        return f"{outcome.name:45} -       {outcome.failed}"
    state = "ALARM" if outcome.alarms else "clean"
    found = "; ".join(f"{s[0]}:{rule}@{place}" for s, rule, place in outcome.findings)
    learned = "" if outcome.learns else " (does not learn)"
    numbers = f"{outcome.first:.3g} -> {outcome.last:.3g}"
    if outcome.name.startswith(_STYLES):
        numbers = f"{outcome.last:.3g} of {outcome.first:.3g}"
    return f"{outcome.name:45} {state}  {numbers}{learned} {found}"


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the number of training runs, and of those with a false error or warning."""
    ran = [o for o in outcomes if not o.failed]
    errors = [o for o in ran if any(f[0] == "error" for f in o.alarms)]
    warned = [o for o in ran if any(f[0] == "warning" for f in o.alarms)]
    return (
        f"{len(ran)} of {len(outcomes)} models ran, {sum(o.learns for o in ran)} learned; "
        f"{len(errors)} with a false error, {len(warned)} with a false warning"
    )


if __name__ == "__main__":
    sys.exit(main())
