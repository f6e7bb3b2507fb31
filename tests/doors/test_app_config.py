"""How an application's own config is saved with a run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from omegaconf import MISSING, DictConfig, OmegaConf

from comgra_decl.doors.hydra import saved_config
from comgra_decl.record.secrets import MASK


def saved(content: Any) -> dict[str, Any]:
    config = OmegaConf.structured(content) if not isinstance(content, dict) else content
    result = saved_config(config if isinstance(config, DictConfig) else OmegaConf.create(config))
    json.dumps(result)
    return result


def test_interpolations_become_values() -> None:
    assert saved({"a": {"b": 2}, "c": "${a.b}", "d": "x${a.b}", "l": ["${c}"], "n": "${a}"}) == {
        "a": {"b": 2},
        "c": 2,
        "d": "x2",
        "l": [2],
        "n": {"b": 2},
    }


def test_hydras_part_and_ours_are_left_out() -> None:
    assert saved({"hydra": {"job": 1}, "comgra": {"graph": False}, "lr": 1}) == {"lr": 1}


def test_what_comes_from_the_environment_stays_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY", "s3cr3t")
    written = "${oc.env:KEY}"
    result = saved({"a": written, "b": "${a}", "c": f"pre-{written}", "d": [written], "e": "${d}"})
    assert result == {"a": written, "b": written, "c": f"pre-{written}", "d": [written],
                      "e": [written]}  # fmt: skip
    assert "s3cr3t" not in json.dumps(result)


def test_what_has_no_value_stays_as_it_is_written() -> None:
    assert saved({"a": "${nowhere}", "b": "???", "c": "${unknown:1}", "d": ["${nowhere}", 1]}) == {
        "a": "${nowhere}",
        "b": "???",
        "c": "${unknown:1}",
        "d": ["${nowhere}", 1],
    }


def test_a_config_that_contains_itself_is_saved_as_written() -> None:
    assert saved({"a": {"b": "${a}"}}) == {"a": {"b": "${a}"}}


def test_secrets_are_masked() -> None:
    assert saved({"wandb": {"api_key": "abc", "project": "p"}}) == {
        "wandb": {"api_key": MASK, "project": "p"}
    }


class Colour(Enum):
    RED = 1


@dataclass
class Inner:
    path: Path = Path("/data")
    colour: Colour = Colour.RED
    needed: int = MISSING


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    raw: bytes = b"x"


def test_dataclasses_are_saved_as_json_can_hold_them() -> None:
    assert saved(Outer()) == {
        "inner": {"path": "/data", "colour": "RED", "needed": "???"},
        "raw": "b'x'",
    }


def test_the_config_itself_is_not_changed() -> None:
    config = OmegaConf.create({"a": "${oc.env:KEY,none}", "b": "${a}"})
    before = OmegaConf.to_container(config, resolve=False)
    saved_config(config)
    assert OmegaConf.to_container(config, resolve=False) == before
