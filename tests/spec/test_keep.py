"""What `keep` and `samples.by` accept."""

from __future__ import annotations

from typing import Any

import pytest

from comgra_decl.errors import SpecError
from comgra_decl.spec import load_spec
from comgra_decl.spec.keep import (
    FunctionTrigger,
    KeepSpec,
    MeasureSpec,
    QuantileTrigger,
    SpikeTrigger,
)

TRIGGERS: list[Any] = [
    "nonfinite",
    "loss_spike",
    {"quantile": 0.99, "of": {"kpi": "loss"}},
    {"quantile": 0.999, "of": {"node": "blocks.*", "statistic": "abs_max", "pass": "grad"}},
    {"spike": 3.0, "of": {"node": "**", "statistic": "l2", "pass": "grad", "role": "weight"}},
    {"_target_": "my.module.function", "limit": 3},
]


def problems(**content: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_spec(content)
    return caught.value.problems


def test_every_kind_of_trigger_can_be_written_and_is_saved_as_it_was() -> None:
    spec = load_spec({"keep": {"ring": 5, "when": TRIGGERS}})
    assert spec.keep is not None
    kinds = [type(trigger) for trigger in spec.keep.when]
    assert kinds == [str, str, QuantileTrigger, QuantileTrigger, SpikeTrigger, FunctionTrigger]
    assert spec.keep.when[-1].model_extra == {"limit": 3}  # type: ignore[union-attr]
    assert load_spec(spec.model_dump(mode="json")) == spec


def test_nothing_is_kept_unless_asked_for_and_little_needs_to_be_said() -> None:
    assert load_spec({}).keep is None
    assert load_spec({}, ["keep={}"]).keep == KeepSpec(when=["nonfinite", "loss_spike"])
    one = load_spec({"keep": {"when": "nonfinite"}}).keep
    assert one is not None
    assert one.when == ["nonfinite"]


@pytest.mark.parametrize(
    ("keep", "where", "what"),
    [
        ({"when": ["nonfinit"]}, "keep.when[0]", "did you mean 'nonfinite'"),
        ({"when": [{"quantil": 0.9}]}, "keep.when[0]", "unknown trigger; choose nonfinite"),
        ({"when": [{"quantile": 1.5}]}, "keep.when[0].quantile", "must be less than 1"),
        ({"when": ["nonfinite", {"spike": 0}]}, "keep.when[1].spike", "must be more than 0"),
        ({"when": [{"quantile": 0.9, "of": {}}]}, "keep.when[0].of", "either a KPI"),
        ({"when": [{"_target_": "f"}]}, "keep.when[0]._target_", "package.module.function"),
        ({"when": [{"quantile": 0.9999}]}, "keep.when[0]", "at least 10000"),
        ({"when": []}, "keep.when", "nothing would be kept"),
        ({"rings": 3}, "keep", "did you mean 'ring'"),
        ({"ring": -1}, "keep.ring", "at least 0"),
        (
            {"when": [{"quantile": 0.9, "of": {"node": "a", "statistic": "absmax"}}]},
            "keep.when[0].of.statistic",
            "did you mean 'abs_max'",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(keep: Any, where: str, what: str) -> None:
    (line,) = problems(keep=keep)
    assert where in line
    assert what in line


def test_all_that_is_wrong_is_said_at_once() -> None:
    keep = {"when": ["nan", {"quantile": 2}], "after": -1}
    assert len(problems(keep=keep, samples={"by": "label"})) == 4


@pytest.mark.parametrize(("quantile", "warm_up"), [(0.99, 100), (0.01, 100), (0.9, 10), (0.5, 10)])
def test_a_quantile_waits_until_one_number_may_lie_beyond_it(quantile: float, warm_up: int) -> None:
    assert QuantileTrigger(quantile=quantile).warm_up == warm_up


def test_a_measure_is_one_thing() -> None:
    with pytest.raises(ValueError, match="either a KPI"):
        MeasureSpec.model_validate({"kpi": "loss", "node": "**"})


@pytest.mark.parametrize(
    "by", ["target", {"input": 1}, {"input": "label"}, {"_target_": "a.b", "names": ["x"]}, None]
)
def test_categories_can_be_written_in_three_ways(by: Any) -> None:
    spec = load_spec({"samples": {"count": 8, "by": by}})
    assert load_spec(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    ("by", "where", "what"),
    [
        ("targets", "samples.by", "did you mean 'target'"),
        ({"imput": 1}, "samples.by", "unknown key 'imput'"),
        ({"input": -1}, "samples.by.input", "at least 0"),
        ({"_target_": "f"}, "samples.by._target_", "package.module.function"),
    ],
)
def test_wrong_categories_are_said_with_their_place(by: Any, where: str, what: str) -> None:
    lines = problems(samples={"by": by})
    assert any(where in line and what in line for line in lines)
