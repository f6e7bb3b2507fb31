"""Models that `deepcopy` rejects are copied nevertheless, without effects on the training."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comgra_decl.errors import ProbeError
from comgra_decl.hooks.probing.copying import CleanCopy
from tests.support.recording import EVERYTHING, Recording, recording


class Counter:
    """Counts under a lock, as an object of a metrics library does."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0

    def add(self) -> None:
        with self.lock:
            self.count += 1


class Net(nn.Module):
    """Has a tied weight, a buffer, dropout, and an attribute that can be copied or not."""

    def __init__(self, attribute: Any = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.drop = nn.Dropout(0.3)
        self.attribute = attribute
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.use()
        return self.second(self.drop(self.bn(self.first(x)).relu()))

    def use(self) -> None:
        if isinstance(self.attribute, Counter):
            self.attribute.add()


class Locked(Net):
    """Its lock is held during steps of the optimizer, in which the copy runs as well."""

    def use(self) -> None:
        with self.attribute:
            pass


class Stubborn(Net):
    """Refuses to be copied, as models that wrap a native library do."""

    def __getstate__(self) -> Any:
        raise TypeError("cannot be pickled")


class Itself(Net):
    def __deepcopy__(self, memo: Any) -> Itself:
        return self


UNCOPYABLE: dict[str, Callable[[], Net]] = {
    "lock": lambda: Locked(threading.Lock()),
    "object with a lock": lambda: Net(Counter()),
    "object in containers": lambda: Net({"a": [(Counter(),)]}),
    "file": lambda: Net(io.FileIO(0, closefd=False)),
    "module of Python": lambda: Net(sys),
    "class that refuses": Stubborn,
    "class that returns itself": Itself,
}


def losses(model: Net, steps: int = 3) -> list[float]:
    torch.manual_seed(1)
    found, optimizer = [], torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    held = model.attribute if isinstance(model, Locked) else threading.Lock()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 4)
        loss.backward()
        with held:
            optimizer.step()
        found.append(loss.item())
    return found


def traced(make: Callable[[], Net]) -> tuple[Net, list[float], Recording]:
    torch.manual_seed(0)
    model = make()
    eyes = {"samples": {"count": 3}, "mode": "train", "schedule": {"every": 1}}
    saliency = {"method": "saliency", "of": "eyes", "target": "label"}
    spec = {"probes": {"eyes": eyes}, "pictures": {"s": saliency}}
    with recording({**EVERYTHING, **spec}) as found:
        result = losses(model)
    assert found.faults == []
    return model, result, found


@pytest.mark.parametrize("case", UNCOPYABLE)
def test_a_model_that_python_cannot_copy_is_probed_like_one_that_it_can(case: str) -> None:
    torch.manual_seed(0)
    alone = UNCOPYABLE[case]()
    wanted = losses(alone)
    model, found, records = traced(UNCOPYABLE[case])
    assert found == wanted
    for ours, other in zip(model.state_dict().values(), alone.state_dict().values(), strict=True):
        assert torch.equal(ours, other)
    assert model.calls == alone.calls == 3
    if isinstance(model.attribute, Counter):
        assert model.attribute.count == 3
    _, _, plain = traced(Net)
    assert records.of("probe:eyes")
    for one, two in zip(records.of("probe:eyes"), plain.of("probe:eyes"), strict=True):
        assert [v.tobytes() for v in one.values.values()] == [
            v.tobytes() for v in two.values.values()
        ]


@pytest.mark.parametrize("case", UNCOPYABLE)
def test_the_copy_has_its_own_modules_and_keeps_ties(case: str) -> None:
    model = UNCOPYABLE[case]()
    copy = CleanCopy(model, {})
    assert isinstance(copy.module, type(model))
    assert not {*copy.module.modules()} & {*model.modules()}
    assert copy.module.first.weight is copy.module.second.weight
    assert not {t.data_ptr() for t in copy.module.state_dict().values()} & {
        t.data_ptr() for t in model.state_dict().values()
    }


def test_what_is_shared_is_reported_once() -> None:
    _, _, found = traced(UNCOPYABLE["file"])
    (warning,) = found.report["warnings"]
    assert "of type FileIO, so the copy uses those of the program" in warning
    for case in ("lock", "object with a lock", "module of Python", "class that refuses"):
        assert traced(UNCOPYABLE[case])[2].report["warnings"] == []


def numbers() -> Iterator[int]:
    yield from range(10)


@pytest.mark.parametrize("make", [numbers, threading.local])
def test_state_that_cannot_be_copied_is_not_shared(make: Callable[[], Any]) -> None:
    with pytest.raises(ProbeError, match=r"Net cannot be copied \(TypeError: cannot pickle"):
        CleanCopy(Net(make()), {})
    _, found, records = traced(lambda: Net(make()))
    torch.manual_seed(0)
    assert found == losses(Net())
    assert records.of("probe:eyes") == []
    (warning,) = records.report["warnings"]
    assert "Net cannot be copied" in warning
