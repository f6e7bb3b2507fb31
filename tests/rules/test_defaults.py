"""The defaults of rules are declared only in their `Parameters`, and shown unchanged."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
import yaml

from comgra_decl.rules.api import Rule
from comgra_decl.rules.catalogue import build, known
from comgra_decl.spec.described import descriptions
from comgra_decl.spec.loading import presets
from comgra_decl.spec.model import Spec
from docs.rules_page import PAGE

RULES = pytest.mark.parametrize("kind", known().values(), ids=lambda kind: str(kind.name))


@cache
def sections() -> dict[str, str]:
    """Returns the text of the rules page below each heading of the third level."""
    parts = re.split(r"^### (\w+)\n", PAGE.read_text(encoding="utf-8"), flags=re.M)
    names = parts[1::2]
    assert len(set(names)) == len(names)
    return {name: text.partition("\n## ")[0] for name, text in zip(names, parts[2::2], strict=True)}


@cache
def defaults() -> dict[str, Rule]:
    """Returns the rules of the default selection by name."""
    return {rule.name: rule for rule in build("default")}


def rows(kind: type[Rule]) -> dict[str, tuple[str, str]]:
    """Returns the default and description of each option as shown on the rules page."""
    found = re.findall(r"^\| `(\w+)` \| (?:`(.*?)`)? ?\| (.*) \|$", sections()[kind.name], re.M)
    return {name: (default, text) for name, default, text in found if name != "severity"}


@RULES
def test_the_page_shows_the_defaults_that_are_used(kind: type[Rule]) -> None:
    used = {name: value for name, value in defaults()[kind.name].parameters if name != "severity"}
    assert {name: json.loads(default) for name, (default, _) in rows(kind).items()} == used


@RULES
def test_every_option_has_a_default_within_its_limits_and_a_description(kind: type[Rule]) -> None:
    defaults = kind.Parameters().model_dump()
    assert kind.Parameters.model_validate(defaults) == kind.Parameters()
    texts = descriptions(kind.Parameters)
    assert all(texts[name].endswith((".", ",")) for name in defaults)


@pytest.mark.parametrize("name", presets())
def test_no_preset_declares_a_default_of_a_rule(name: str) -> None:
    content: dict[str, Any] = yaml.safe_load(presets()[name].read_text(encoding="utf-8"))
    assert content.get("rules", "default") in ("default", "off")
    assert Spec.model_fields["rules"].default in ("default", "off")
