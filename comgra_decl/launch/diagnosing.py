"""What `comgra-decl diagnose` says, as data; and which rules a spec asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comgra_decl.errors import SpecError

if TYPE_CHECKING:
    from comgra_decl.query import Run
    from comgra_decl.rules import Check, Correlation, Diagnosis
    from comgra_decl.spec.rules import Rules


def rules_of(text: str | None) -> Rules | None:
    """Returns the rules that a YAML file declares, at its top or under `rules`.

    Raises:
        SpecError: there is no such file, or it declares something else.
    """
    if text is None or text == "default":
        return None if text is None else "default"
    import yaml
    from pydantic import TypeAdapter, ValidationError

    from comgra_decl.spec import rules as declared
    from comgra_decl.store.location import require_path

    require_path(text)

    try:
        content = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise SpecError([f"--rules: {text} cannot be read as YAML: {error}"]) from None
    if isinstance(content, dict) and set(content) == {"rules"}:
        content = content["rules"]
    try:
        found: Rules = TypeAdapter(declared.Rules).validate_python(content)
    except ValidationError:
        raise SpecError([f"--rules: {text} is no mapping of rules to parameters"]) from None
    return found


def described(
    run: Run, diagnosis: Diagnosis, together: Sequence[Correlation] = ()
) -> dict[str, Any]:
    """Returns a diagnosis as JSON can hold it."""
    from comgra_decl.rules import health

    return {
        "run": str(run.path),
        "state": run.state,
        "records": diagnosis.records,
        "health": [_answered(check) for check in health(diagnosis)],
        "findings": [finding.to_json() for finding in diagnosis.findings],
        "together": [correlation.to_json() for correlation in together],
        "checked": diagnosis.checked,
        "losses": [*diagnosis.losses],
        "unchecked": {entry.rule: entry.reason for entry in diagnosis.unchecked},
    }


def _answered(check: Check) -> dict[str, Any]:
    return {
        "part": check.question.part,
        "question": check.question.text,
        "colour": check.colour,
        "evidence": check.evidence,
        "findings": [finding.rule for finding in check.findings],
    }
