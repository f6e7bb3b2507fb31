"""Where specs are read from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict

from comgra_decl.errors import SpecError
from comgra_decl.records import STATISTICS
from comgra_decl.spec import Spec, load_spec
from comgra_decl.spec.base import SpecModel
from comgra_decl.spec.described import descriptions
from comgra_decl.spec.loading import presets


def problems(source: Any, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as raised:
        load_spec(source, overrides)
    return raised.value.problems


def test_the_presets_are_those_of_the_hydra_group() -> None:
    assert list(presets()) == ["attention", "debug", "language", "light", "off", "vision"]
    for path in presets().values():
        text = path.read_text()
        assert text.startswith("# @package hydra.callbacks.comgra\n")
        content = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(content, dict)
        if "defaults" in content:  # another preset sets it
            continue
        assert content["_target_"] == "comgra_decl.doors.hydra.TraceCallback"
        assert content["_recursive_"] is False
        assert content["_convert_"] == "all"


def test_debug_records_everything_of_every_module() -> None:
    spec = load_spec("debug")
    assert spec.stats == list(STATISTICS)
    assert spec.nodes["all"].values
    assert spec.nodes["all"].capture == ["output", "output_grad"]
    assert spec.nodes["weights"].capture == ["parameter", "parameter_grad"]


def test_off_records_nothing() -> None:
    assert not load_spec("off").enabled


@pytest.mark.parametrize("preset", ["debug", "light"])
def test_a_preset_spells_out_every_key_so_that_hydra_can_override_it(preset: str) -> None:
    content = OmegaConf.to_container(OmegaConf.load(presets()[preset]))
    assert isinstance(content, dict)
    ours = {key for key in content if not str(key).startswith("_")}
    assert ours == set(Spec.model_fields)
    for key in ("run", "schedule", "samples", "values", "store"):
        assert set(content[key]) == set(type(getattr(load_spec(preset), key)).model_fields)


def test_a_file_extends_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [light, _self_]\nschedule: {every: 7}\n_target_: ignored\n")
    spec = load_spec(path)
    assert spec.schedule.every == 7
    assert spec.nodes == load_spec("light").nodes
    assert load_spec(str(path)) == spec


def test_a_file_extends_a_file_beside_it_wherever_one_stands(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("schedule: {first: 3, every: 5}\n")
    (tmp_path / "late.yaml").write_text("defaults: [_self_, base]\nschedule: {first: 9}\n")
    (tmp_path / "early.yaml").write_text("defaults: [base]\nschedule: {first: 9}\n")
    assert load_spec(tmp_path / "late.yaml").schedule.first == 3
    assert load_spec(tmp_path / "early.yaml").schedule.first == 9
    assert load_spec(tmp_path / "early.yaml").schedule.every == 5


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [1", "cannot be read as YAML"),
        ("- a\n", "is not a mapping"),
        ("defaults: [self]\n", "refers to itself"),
        ("defaults: [debgu]\n", "did you mean 'debug'"),
    ],
)
def test_a_file_that_is_no_spec_is_explained(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "self.yaml"
    path.write_text(text)
    (problem,) = problems(path)
    assert complaint in problem


def test_an_unknown_preset_names_the_known_ones() -> None:
    assert problems("debgu") == [
        (
            "comgra: 'debgu' is neither a preset (attention, debug, language, light, off, vision) "
            "nor a YAML file; did you mean 'debug'?"
        )
    ]


def test_overrides_change_single_keys() -> None:
    spec = load_spec(
        "debug",
        [
            "schedule.every=10",
            "+nodes.attn={select: '**.attn', values: true}",
            "++nodes.all.capture=[output]",
            "nodes.weights=null",
            "histogram=null",
            "run.name=3",
            "schedule.steps=[5, 1]",
        ],
    )
    assert spec.schedule.every == 10
    assert list(spec.nodes) == ["all", "attn"]
    assert spec.nodes["all"].capture == ["output"]
    assert spec.nodes["attn"].values
    assert spec.histogram is None
    assert spec.run.name == "3"
    assert spec.schedule.steps == [1, 5]
    assert spec.schedule.first == load_spec("debug").schedule.first


def test_an_override_takes_a_key_out() -> None:
    assert list(load_spec("debug", ["~nodes.weights"]).nodes) == ["all"]
    assert problems("debug", "~nodes.wights") == [
        "comgra: cannot remove 'nodes.wights', which does not exist; did you mean 'weights'?"
    ]


def test_all_overrides_that_make_no_sense_are_said() -> None:
    found = problems("debug", "schedule.every", "=3", "stats=[a", "graph=true")
    assert len(found) == 3
    assert found[0] == "comgra: override 'schedule.every' must look like 'schedule.every=10'"
    assert found[2].startswith("comgra.stats: '[a' cannot be read as YAML")


def test_a_spec_is_changed_by_a_copy() -> None:
    spec = load_spec("debug")
    assert load_spec(spec) is spec
    assert load_spec(spec, ["graph=false"]).graph is False
    assert spec.graph is True


def test_interpolations_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch")
    spec = load_spec(
        {"run": {"root": "${oc.env:SCRATCH}/runs", "group": "${.root}"}}, ["run.group=g"]
    )
    assert spec.run.root == "/scratch/runs"


def test_an_interpolation_may_reach_the_config_around_the_spec() -> None:
    around = OmegaConf.create({"seed": 7, "comgra": {"run": {"name": "seed-${seed}"}}})
    assert load_spec(around.comgra).run.name == "seed-7"
    assert around.comgra.run.name == "seed-7"


def test_an_entry_that_is_missing_is_said_with_its_key() -> None:
    around = OmegaConf.create({"a": {"comgra": {"run": {"name": "???"}, "graph": "${nope}"}}})
    found = problems(around.a.comgra)
    assert [line.partition(":")[0] for line in found] == ["comgra.run.name", "comgra.graph"]


def test_values_cannot_be_changed_by_accident() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_spec("debug").graph = False


def test_nonfinite_is_always_among_the_statistics() -> None:
    assert load_spec({"stats": ["std", "mean"]}).stats == ["mean", "std", "nonfinite"]
    assert load_spec({"stats": []}).stats == ["nonfinite"]


@settings(max_examples=15)
@given(st.sets(st.sampled_from(STATISTICS)))
def test_a_spec_survives_being_saved(stats: set[str]) -> None:
    spec = load_spec("debug", [f"stats=[{','.join(stats)}]", "schedule.eval=null"])
    assert load_spec(spec.model_dump(mode="json")) == spec


def all_models(model: type[BaseModel]) -> list[type[BaseModel]]:
    return [m for sub in model.__subclasses__() for m in (sub, *all_models(sub))]


class Documented(BaseModel):
    """As pydantic reads it, if configured to."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    first: int = 1
    """One line."""
    second: int = 2
    third: str = ""
    """Several
    lines.

        With a block.
    """


class Inheriting(Documented):
    """Has its own keys, and a new docstring for one of those it inherits."""

    second: int = 3
    """Documented below."""
    fourth: int = 4
    """Its own."""


@pytest.mark.parametrize("model", [Documented, Inheriting])
def test_docstrings_are_read_as_pydantic_reads_them(model: type[BaseModel]) -> None:
    fields = model.model_fields.items()
    assert descriptions(model) == {n: f.description for n, f in fields if f.description}


def test_every_key_is_documented() -> None:
    for model in all_models(SpecModel):
        assert set(model.model_fields) <= set(descriptions(model)), model.__name__
