"""What `stats` accepts, and how mistakes in it are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from comgra_decl.errors import SpecError
from comgra_decl.spec import Spec, load_spec
from comgra_decl.stats.measures import EffectiveRank, Top

MINE = {"name": "mine", "_target_": "package.module.function", "on": "output", "power": 3}


def test_names_come_in_stored_order_and_mappings_after_them() -> None:
    spec = load_spec({"stats": [MINE, "singular_value", "q50", "rms", "std"]})
    assert spec.statistics == ("std", "nonfinite", "rms", "q50", "singular_value", "mine")
    assert [statistic.name for statistic in spec.opt_in] == ["q50", "singular_value", "mine"]
    assert load_spec({}).opt_in == []


def test_a_spec_survives_being_saved() -> None:
    entries = [MINE, "kurtosis", {"name": "q999", "quantile": 0.999, "nodes": "blocks.*"}]
    spec = load_spec({"stats": [*entries, {"name": "effective_rank", "on": ["output"]}]})
    assert Spec.model_validate(spec.model_dump(mode="json")) == spec
    assert load_spec(spec.model_dump(mode="json")) == spec


def test_keys_that_are_not_ours_are_the_function_s() -> None:
    (statistic,) = load_spec({"stats": [MINE]}).opt_in
    assert statistic.model_extra == {"power": 3}
    assert statistic.on == ["output"]


def test_every_name_that_can_be_asked_for_has_a_meaning() -> None:
    from comgra_decl.hooks.tensors.opt_in_statistics import Measured
    from comgra_decl.spec.stats import _OPTIONAL

    spec = load_spec({"stats": list(_OPTIONAL)})
    refused: dict[str, str] = {}
    Measured(spec.opt_in, refuse=refused.setdefault, complete=False)
    assert not refused
    assert {*Top.names, *EffectiveRank.names} <= {*_OPTIONAL}


WRONG: dict[str, tuple[Any, str]] = {
    "misspelt": ("singular_valu", "stats[0]: 'singular_valu' is not one of mean, abs_mean"),
    "near": ("singular_valu", "did you mean 'singular_value'?"),
    "a number": (3, "stats[0]: 3 is not one of mean"),
    "misspelt in a mapping": ({"name": "kurtosi"}, "stats[0].name: 'kurtosi' is not one of"),
    "own, without function": ({"name": "mine"}, "a custom statistic needs a '_target_'"),
    "everywhere or nowhere": ({"name": "mean", "on": "output"}, "write only its name"),
    "no name": ({"quantile": 0.5}, "stats[0].name: is required"),
    "a name that is taken": (
        {"name": "std", "quantile": 0.5},
        "'std' is the name of an existing statistic",
    ),
    "a derived name": (MINE | {"name": "update_ratio"}, "is the name of an existing statistic"),
    "a name with a space": (MINE | {"name": "my own"}, "'my own' must consist of letters"),
    "too much": ({"name": "q", "quantile": 1.5}, "stats[0].quantile: 1.5 must be at most 1"),
    "no function": (MINE | {"_target_": "f"}, "'f' does not name a function"),
    "no capture": ({"name": "kurtosis", "on": "outpt"}, "stats[0].on: 'outpt' is not one of"),
    "no glob": ({"name": "kurtosis", "nodes": "a**"}, "stats[0].nodes: in 'a**'"),
    "unknown key": ({"name": "kurtosis", "node": "a"}, "stats[0]: unknown key 'node'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_are_said_where_they_are(what: str) -> None:
    entry, sentence = WRONG[what]
    with pytest.raises(SpecError) as raised:
        load_spec({"stats": [entry]})
    assert sentence in str(raised.value)
    assert str(raised.value).startswith("comgra.stats[0]")


def test_two_of_one_name() -> None:
    for entries in ([MINE, MINE], ["kurtosis", {"name": "kurtosis", "on": "output"}]):
        with pytest.raises(SpecError, match=r"comgra.stats: '(mine|kurtosis)' is listed twice"):
            load_spec({"stats": entries})


def test_no_statistic_of_one_s_own_is_called_like_one_that_reading_makes() -> None:
    from comgra_decl.query import derived
    from comgra_decl.spec import stats

    assert stats.DERIVED == derived.NAMES


@pytest.mark.parametrize("on", ["on", "'on'"])
def test_a_key_that_yaml_takes_for_a_truth_value_is_read_as_written(
    tmp_path: Path, on: str
) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"defaults: [debug]\nstats: [mean, {{name: singular_value, {on}: [parameter]}}]\n"
    )
    spec = load_spec(tmp_path / "mine.yaml")
    written = load_spec({"stats": ["mean", {"name": "singular_value", "on": ["parameter"]}]})
    assert spec.stats == written.stats
    assert load_spec(
        "debug", [f"stats=[mean,{{name: singular_value, {on}: [parameter]}}]"]
    ).stats == (written.stats)
