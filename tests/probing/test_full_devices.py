"""A device without memory for a probe moves it to the CPU, and never ends the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from comgra_decl.hooks.probing import passes
from comgra_decl.hooks.probing.copying import CleanCopy
from tests.probing.nets import Trained, train
from tests.support.recording import EVERYTHING, Recording, contents, recording

EYES = "probe:eyes"
PICTURES = {
    "line": {"method": "integrated_gradients", "of": "eyes", "points": 2},
    "cam": {"method": "grad_cam", "of": "eyes", "select": {"class": "Conv2d"}, "target": "loss"},
    "bend": {"method": "hessian", "of": "eyes", "points": 3},
}
RUN: Callable[..., Any] = CleanCopy.run


class Full:
    """Runs out of memory at the end of a pass of a copy.

    Args:
        begin: how many passes succeed on the device.
        host: whether the passes on the CPU fail as well.
    """

    def __init__(self, begin: int = 0, *, host: bool = False) -> None:
        self.begin, self.host = begin, host
        self.calls: list[bool] = []  # of each pass: whether the copy had moved

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Full:
        def run(copy: CleanCopy, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(copy.moved)
            result = RUN(copy, *args, **kwargs)
            if self.host if copy.moved else self.calls.count(False) > self.begin:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return result

        monkeypatch.setattr(CleanCopy, "run", run)
        return self


def probed(mode: str = "train", **spec: Any) -> tuple[Trained, Recording]:
    eyes = {"samples": {"count": 4}, "mode": mode, "schedule": {"every": 2}}
    declared = {"probes": {"eyes": eyes}, "pictures": PICTURES, **spec}
    with recording({**EVERYTHING, **declared}) as found:
        result = train("conv")
    assert found.faults == []
    return result, found


def of_probes(found: Recording) -> list[Any]:
    places = [i for i, step in enumerate(found.steps) if step.info.type != "train"]
    return [contents(found, place) for place in places]


# the pass of the record, one of the first picture, and one of the last
@pytest.mark.parametrize("begin", [0, 2, 5])
def test_the_passes_are_repeated_on_the_cpu_and_later_copies_are_made_there(
    begin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, wanted = probed()
    full = Full(begin).install(monkeypatch)
    result, found = probed()
    assert result.state() == train("conv").state()
    assert of_probes(found) == of_probes(wanted)
    assert full.calls[: begin + 1] == [False] * (begin + 1)
    assert all(full.calls[begin + 1 :])
    (warning,) = found.report["warnings"]
    assert "cpu lacks memory for passes of the copy, so the copy is on the CPU" in warning


def test_a_probe_that_fits_nowhere_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = Full(host=True).install(monkeypatch)
    result, found = probed()
    assert result.state() == train("conv").state()
    assert (found.of(EYES), full.calls) == ([], [False, True])
    _, warning = found.report["warnings"]
    assert "OutOfMemoryError: CUDA out of memory" in warning
    assert "The run has no records from this probe" in warning


def test_a_picture_that_fits_nowhere_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def grad(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.autograd, "grad", grad)
    result, found = probed()
    assert result.state() == train("conv").state()
    assert len(found.of(EYES)) == 3
    reasons = [text for text in found.report["warnings"] if "there are no pictures" in text]
    assert "'line', 'cam', 'bend': OutOfMemoryError: CUDA out of memory" in reasons[0]


def test_an_intervention_is_made_on_the_cpu_from_the_next_record_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zero = {"of": "eyes", "select": "conv2", "do": "zero"}
    spec: dict[str, Any] = {"pictures": {}, "interventions": {"zero": zero}}
    _, wanted = probed(**spec)
    rehearsed = 2  # passes before the first step
    Full(rehearsed + 1).install(monkeypatch)
    result, found = probed(**spec)
    assert result.state() == train("conv").state()
    assert len(found.of(EYES)) == len(wanted.of(EYES)) == 3
    assert len(found.of("intervention:zero")) == len(wanted.of("intervention:zero")) - 1
    assert of_probes(found) == [each for i, each in enumerate(of_probes(wanted)) if i != 1]
    assert "from the next record on. Until then, there is no intervention 'zero'" in str(
        found.report["warnings"]
    )


def test_a_change_without_memory_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(passes, "changed", changed)
    zero = {"of": "eyes", "select": "conv2", "do": "zero"}
    result, found = probed(interventions={"zero": zero})
    assert result.state() == train("conv").state()
    assert len(found.of(EYES)) == 3
    assert "intervention 'zero' is not made: OutOfMemoryError" in str(found.report["warnings"])


def test_a_lens_without_memory_is_no_lens_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.embed(tokens)))

    calls = 0

    def head(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:  # after the training's, the record's and the lens's own
            raise torch.OutOfMemoryError("CUDA out of memory")
        return linear(*args)

    linear = F.linear
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lens = {"method": "logit_lens", "of": "eyes", "select": "embed"}
    with recording({**EVERYTHING, "probes": {"eyes": {}}, "pictures": {"lens": lens}}) as found:
        monkeypatch.setattr(F, "linear", head)
        tokens = torch.arange(12).reshape(3, 4) % 7
        F.cross_entropy(model(tokens).transpose(1, 2), tokens).backward()
        optimizer.step()
    (warning,) = [text for text in caplog.messages if "probe" in text]
    assert "so the copy is on the CPU" in warning
    assert any(key.pass_ == "picture:lens" for key in found.slots)
