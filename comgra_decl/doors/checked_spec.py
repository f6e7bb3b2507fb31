"""Check a program's declared spec before training: its form, its rules, and its functions.

The form is checked in `spec` and the rules in `rules`; this module collects all problems, so that
they can be reported together.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comgra_decl.errors import SpecError, did_you_mean

if TYPE_CHECKING:
    from comgra_decl.spec import Spec

Place = Mapping[str, str | Path | None]
"""Root, group and name of the run, as given outside the spec."""


def load_spec(source: str | Path | Mapping[str, Any] | Spec, overrides: Sequence[str] = ()) -> Spec:
    """Return the spec that `source` declares.

    Imports nothing that the spec names; `comgra.trace` and the other entry points import it when
    they start.

    Args:
        source: name of a preset, path of a YAML file, a mapping with the same keys, or a Spec. A
            file may begin with `defaults: [debug, _self_]` to extend a preset or another file.
        overrides: changes such as "schedule.every=10", "nodes.attn={select: '*.attn'}" or
            "~nodes.weights", which removes the key.

    Raises:
        SpecError: the spec is invalid; lists every problem, one per line.
    """
    from comgra_decl.spec import loading

    return loading.load_spec(source, overrides, further=_of_rules)


def declared(
    source: str | Path | Mapping[str, Any] | Spec,
    overrides: Sequence[str] = (),
    *,
    place: Place | None = None,
    functions: bool = True,
) -> Spec:
    """Return the spec of a program that is about to be traced.

    Args:
        source: as in `load_spec`.
        overrides: as in `load_spec`.
        place: root, group and name given outside the spec; they take precedence over the spec.
        functions: whether to import, at this point, the functions that the spec names. Pass False
            before the program has started, because the program may still have to set up its import
            path.

    Raises:
        SpecError: the spec is invalid; lists every problem, one per line.
    """
    from comgra_decl.spec import loading

    def further(content: Mapping[str, Any]) -> list[str]:
        found = _of_rules(content, trust=True) + _of_terminal(content) + _of_tokens(content)
        found += _of_masks(content)
        if functions:
            found += _of_functions(content)
        return found + _of_place(place or {})

    spec = loading.load_spec(source, overrides, further=further)
    stated = {key: str(value) for key, value in (place or {}).items() if value is not None}
    if not stated:
        return spec
    changed = type(spec.run).model_validate({**spec.run.model_dump(mode="json"), **stated})
    found = {path: each for path, each in spec.expressions.items() if path[0] != "run"}
    return spec.model_copy(update={"run": changed}).with_expressions(found)


def require_functions(spec: Spec) -> None:
    """Check that every function named in a spec can be imported.

    Raises:
        SpecError: at least one function cannot be imported.
    """
    problems = _of_functions(spec.model_dump(mode="json"))
    if problems:  # a checked spec has reordered its statistics, so an index would be misleading
        raise SpecError(re.sub(r"^comgra\.stats\[\d+\]", "comgra.stats", p) for p in problems)


def require_at_first_step(spec: Spec, *, end: Callable[[SpecError], None]) -> None:
    """Run the same check before the first optimizer step, when all the program's modules exist.

    Args:
        spec: spec of a program that has not started yet.
        end: receives the error and ends the program.
    """
    content = spec.model_dump(mode="json")
    if not spec.enabled or not any(True for _ in _targets(content)):
        return
    from comgra_decl.hooks.hook_lists import before_steps

    def once(*_: Any) -> None:
        placed.remove()
        try:
            require_functions(spec)
        except SpecError as error:
            end(error)

    placed = before_steps.add(once)


def _of_rules(content: Mapping[str, Any], *, trust: bool = False) -> list[str]:
    """Return the problems in `rules`, ignoring invalid entries; `trust` imports custom rules."""
    declared = content.get("rules", "default")
    if not isinstance(declared, Mapping):
        return []  # without rules, skip the slow imports
    from pydantic import TypeAdapter, ValidationError

    from comgra_decl.rules.catalogue import problems
    from comgra_decl.spec.rules import Rules

    form: TypeAdapter[Any] = TypeAdapter(Rules)
    rules: dict[str, Any] = {}
    for name, entry in declared.items():
        with suppress(ValidationError):  # reported by the check of the form
            rules |= form.validate_python({name: entry})
    return problems(rules, trust=trust)


def _of_terminal(content: Mapping[str, Any]) -> list[str]:
    """Return an error if a debugger is requested but standard input is not a terminal."""
    from comgra_decl.records import SEVERITIES

    stated = content.get("on_finding")
    limit = stated.get("break", "never") if isinstance(stated, Mapping) else "never"
    traces = content.get("enabled", True) is not False and content.get("dry_run") is not True
    if limit not in SEVERITIES or not traces or _has_terminal():
        return []
    why = "opens a debugger, which requires a terminal as standard input"
    instead = f"run the program in a terminal, or use `stop: {limit}` to end it instead"
    return [f"comgra.on_finding.break: {limit} {why}; {instead}"]


def _of_tokens(content: Mapping[str, Any]) -> list[str]:
    """Return the problems with the file that contains the tokens."""
    stated = content.get("tokens")
    file = stated.get("file") if isinstance(stated, Mapping) else None
    if not isinstance(file, str) or not file or content.get("enabled", True) is False:
        return []
    from comgra_decl.record.token_file import read_tokens

    try:
        read_tokens(file)
    except SpecError as error:
        return error.problems
    return []


def _of_masks(content: Mapping[str, Any]) -> list[str]:
    """Return the problems with addresses that an earlier run has not saved."""
    from comgra_decl.record.secrets import MASK

    notify = _get(content.get("on_finding"), "notify")
    return [
        f"comgra.on_finding.notify.{key}: this address was not saved with the run; state it again"
        for key in ("url", "slack")
        if MASK in str(_get(notify, key))
    ]


def _has_terminal() -> bool:
    try:
        return sys.stdin is not None and sys.stdin.isatty()
    except ValueError:  # it is closed
        return False


def _of_functions(content: Mapping[str, Any]) -> list[str]:
    """Return the problems with the custom functions named in a spec."""
    reasons = [(where, target, _not_usable(where, target)) for where, target in _targets(content)]
    return [f"comgra.{where}._target_: {target!r} {why}" for where, target, why in reasons if why]


_RAISES = "on_finding.raises"


def _not_usable(where: str, target: str) -> str | None:
    """Return the reason why a place in a spec cannot name something, or None."""
    reason = _not_imported(target)
    if reason is not None or where != _RAISES:
        return reason
    module, _, name = target.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    if found is None:
        return None
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        return "is not an exception class"
    try:
        found("the message")
    except Exception as error:  # noqa: BLE001 - of any class
        return f"cannot be created from a message alone: {error}"
    return None


def _targets(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each function that a spec names, with its location."""
    for where, entry in _entries(content):
        target = entry.get("_target_") if isinstance(entry, Mapping) else None
        if isinstance(target, str):
            yield where, target


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each place in a spec, valid or not, that may name a function."""
    yield from _each("stats", content.get("stats"))
    for key in ("types", "samples", "keep"):
        inner = content.get(key)
        name = "when" if key == "keep" else "by"
        if isinstance(inner, Mapping):
            yield from _each(f"{key}.{name}", inner.get(name))
    yield _RAISES, _get(content.get("on_finding"), "raises")
    probes = content.get("probes")
    for name, probe in probes.items() if isinstance(probes, Mapping) else ():
        if isinstance(probe, Mapping):
            yield f"probes.{name}.batch", probe.get("batch")
            samples = probe.get("samples")
            yield f"probes.{name}.samples.by", _get(samples, "by")
    pictures = content.get("pictures")
    for name, picture in pictures.items() if isinstance(pictures, Mapping) else ():
        for key in ("method", "measure"):
            yield f"pictures.{name}.{key}", _get(picture, key)
    dictionaries = content.get("dictionaries")
    for name, each in dictionaries.items() if isinstance(dictionaries, Mapping) else ():
        yield f"dictionaries.{name}.load", _get(each, "load")
    interventions = content.get("interventions")
    for name, each in interventions.items() if isinstance(interventions, Mapping) else ():
        where, first = f"interventions.{name}", _get(each, "first")
        yield f"{where}.do", _get(each, "do")
        yield f"{where}.measure", _get(each, "measure")
        yield f"{where}.measure.of", _get(_get(each, "measure"), "of")
        for i, change in enumerate(first if isinstance(first, list) else ()):
            yield f"{where}.first[{i}].do", _get(change, "do")


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _each(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        yield from ((f"{where}[{i}]", entry) for i, entry in enumerate(value))
    else:
        yield where, value


def _not_imported(target: str) -> str | None:
    """Import a function's module; return the reason why the function cannot be used, or None.

    The generators are restored, since the module may draw from them while it is imported.
    """
    from comgra_decl.hooks.probing.seclusion import generators_kept

    module, _, name = target.rpartition(".")
    if not module or not all(part.isidentifier() for part in target.split(".")):
        return None  # malformed, already reported
    try:
        with generators_kept([]):
            home = import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (the user's own code)
        if isinstance(error, ModuleNotFoundError) and error.name == "captum":
            return "needs Captum, which is not installed: pip install 'comgra-decl[captum]'"
        return f"cannot be imported: {type(error).__name__}: {error}"
    if module == "__main__" and not hasattr(home, name):
        return None  # the program may define it later
    function = getattr(home, name, None)
    if callable(function):
        return None
    if function is None and not hasattr(home, name):
        return f"does not exist: {module!r} has no {name!r}{did_you_mean(name, vars(home))}"
    return f"is not a function but a {type(function).__name__}"


def _of_place(place: Place) -> list[str]:
    from pydantic import ValidationError

    from comgra_decl.spec import Spec
    from comgra_decl.spec.problems import explain

    stated = {"run": {key: str(value) for key, value in place.items() if value is not None}}
    try:
        Spec.model_validate(stated)
    except ValidationError as error:
        return explain(error, Spec, stated)
    return []
