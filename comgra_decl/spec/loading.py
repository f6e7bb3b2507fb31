"""Read a spec from a preset, a YAML file or a mapping."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from comgra_decl.errors import SpecError, did_you_mean, shown
from comgra_decl.spec.expressions import Written, recalled, unresolved
from comgra_decl.spec.model import KeyPath, Spec
from comgra_decl.spec.plain import Plain
from comgra_decl.spec.problems import explain
from comgra_decl.spec.rules import secret_in
from comgra_decl.spec.yaml_text import read_yaml_text

PRESET_FOLDER = Path(__file__).parents[1] / "configs" / "comgra"
"""Folder of the presets, in the installed package as well as in the repository."""

HYDRA_KEYS = ("_target_", "_recursive_", "_convert_", "_partial_", "_args_", "defaults")
"""Keys in a preset that are meant for Hydra and are not part of the spec."""

_VARIABLE = re.compile(r"\$\{\s*oc\.env:\s*\w+\s*(?:,(?P<default>[^{}]*))?\}")
"""A variable of the environment in an expression."""


def presets() -> dict[str, Path]:
    """Return the files of all shipped presets by name."""
    return {path.stem: path for path in sorted(PRESET_FOLDER.glob("*.yaml"))}


Further = Callable[[Mapping[str, Any]], list[str]]
"""Checks the content of a spec rather than its form, and returns the problems. The content may be
malformed."""


def load_spec(
    source: str | Path | Mapping[str, Any] | Spec,
    overrides: Sequence[str] = (),
    *,
    further: Further = lambda _: [],
    known: Mapping[KeyPath, tuple[str, Any]] | None = None,
) -> Spec:
    """Return the spec that `source` declares.

    Args:
        source: name of a preset, path of a YAML file, a mapping with the same keys, or a Spec. A
            file may begin with `defaults: [debug, _self_]` to extend a preset or another file.
        overrides: changes such as "schedule.every=10", "nodes.attn={select: '*.attn'}" or
            "~nodes.weights", which removes the key.
        further: additional checks; the problems that they find are reported together with all
            others.
        known: environment expressions that keep their earlier values, as in `Spec.expressions`.

    Raises:
        SpecError: the spec is invalid; lists every problem, one per line.
    """
    refused: dict[str, str] = {}
    config = _overridden(_read(source, refused), _listed(overrides))
    written = Written.of(recalled(config, known) if known else config)
    content, problems = _resolved(config)
    content = {k: _named(v) for k, v in content.items() if k not in HYDRA_KEYS}
    found = {**(known or {}), **written.expressions(content)}
    spec: Spec | None = None
    try:
        spec = Spec.model_validate(content)
    except ValidationError as error:
        lines = explain(error, Spec, content)
        problems += [line for line in lines if line.partition(": ")[0] not in refused]
    problems += further(content)
    problems += _of_secrets(content, found)
    problems[:0] = [f"{path}: {why}" for path, why in refused.items()]
    if problems or spec is None:
        raise SpecError(dict.fromkeys(problems))
    if isinstance(source, Spec) and not overrides and not written.texts:
        return source
    return spec.with_expressions(found) if found else spec


def _of_secrets(content: Mapping[str, Any], found: Mapping[KeyPath, tuple[str, Any]]) -> list[str]:
    """Return a problem for each password, and each URL with a secret, that is in plain text."""
    problems = []
    for key in ("email", "password"), ("url",), ("slack",):
        path: KeyPath = ("on_finding", "notify", *key)
        value: Any = content
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if not isinstance(value, str):
            continue
        literals = [value] if path not in found else _literals(found[path][0])
        if "password" in key:
            part = "the whole password" if literals else None
        else:
            parts = (secret_in(text, webhook="slack" in key) for text in literals)
            part = next((each for each in parts if each is not None), None)
        if part is not None:
            problems.append(
                f"comgra.{'.'.join(map(str, path))}: {part} must come from the environment; use an "
                "expression such as `${oc.env:NAME}`"
            )
    return problems


def _literals(expression: str) -> list[str]:
    """Return the text in an expression that does not come from the environment.

    This is what surrounds the variables, as one text, and their default values.
    """
    defaults = [m["default"] for m in _VARIABLE.finditer(expression) if m["default"]]
    return [text for text in (_VARIABLE.sub("", expression), *defaults) if text]


def _resolved(config: DictConfig) -> tuple[dict[Any, Any], list[str]]:
    """Return the content with all interpolations resolved, and those that could not be resolved."""
    problems: list[str] = []
    prefix = config._get_full_key("")  # noqa: SLF001  (a part of a larger config has no other name)
    while True:
        try:
            content = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            whole: object = error.full_key  # a number, if that is the key of the whole entry
            key = ("" if whole is None else str(whole)).removeprefix(f"{prefix}.")
            problems.append(f"comgra.{key}: {_first_line(error)}")
            # Remove the entry, so that other problems can be found too.
            if not _taken_out(config, key.partition("[")[0]):
                raise SpecError(problems) from None
        else:
            assert isinstance(content, dict)
            return content, problems


def _named(content: Any) -> Any:
    """Return the content with the `on` key restored, which YAML 1.1 reads as a boolean."""
    if isinstance(content, dict):
        return {"on" if key is True else key: _named(value) for key, value in content.items()}
    return [_named(value) for value in content] if isinstance(content, list) else content


def _read(source: object, refused: dict[str, str]) -> DictConfig:
    """Return the content of a spec; add values that YAML cannot represent to `refused`."""
    if isinstance(source, Spec):
        return OmegaConf.create(unresolved(source))
    if isinstance(source, DictConfig):
        return source.copy()
    if isinstance(source, Mapping):
        plain = Plain(source)
        refused.update(plain.problems)
        return OmegaConf.create(plain.content)
    if isinstance(source, (str, Path)):
        return _read_file(_find(source, Path()), ())
    problem = (
        f"comgra: {shown(source)} ({type(source).__name__}) is not a spec; pass the name of a "
        f"preset ({', '.join(presets())}), the path of a YAML file, a mapping with the same "
        "keys, or a Spec"
    )
    raise SpecError([problem])


def _listed(overrides: Iterable[object]) -> list[str]:
    """Return the overrides as a list of strings, if they are one."""
    texts = [*overrides] if isinstance(overrides, (list, tuple, ListConfig)) else None
    if texts is None or not all(isinstance(text, str) for text in texts):
        expected = "a list of strings such as ['schedule.every=10']"
        raise SpecError([f"comgra: overrides must be {expected}, got {shown(overrides)}"])
    return [str(text) for text in texts]


def _find(source: str | Path, folder: Path) -> Path:
    """Return the file that `source` names; relative paths are resolved in `folder`."""
    if str(source) in presets():
        return presets()[str(source)]
    for candidate in (folder / source, folder / f"{source}.yaml"):
        with suppress(OSError, ValueError):  # not a possible file name
            if candidate.is_file():
                return candidate
    names = ", ".join(presets())
    near = did_you_mean(str(source), presets())
    raise SpecError(
        [f"comgra: {shown(str(source))} is neither a preset ({names}) nor a YAML file{near}"]
    )


def _read_file(path: Path, readers: tuple[Path, ...]) -> DictConfig:
    """Return the content of a YAML file, merged with the specs in its `defaults`."""
    if path in readers:
        raise SpecError([f"comgra: {path} refers to itself in its 'defaults'"])
    try:
        config = _parsed(read_yaml_text(path)).copy()
    except RecursionError:
        raise SpecError([f"comgra: {path} cannot be read as YAML: nested too deeply"]) from None
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise SpecError([f"comgra: {path} cannot be read as YAML: {error}"]) from None
    if not isinstance(config, DictConfig):
        raise SpecError([f"comgra: {path} is not a mapping of keys to values"])
    parts = _parts(config, path, readers)
    merged = OmegaConf.merge(*parts)
    assert isinstance(merged, DictConfig)
    return merged


@functools.lru_cache(maxsize=16)  # a program may trace many executions with one preset
def _parsed(text: str) -> DictConfig | ListConfig:
    return OmegaConf.load(StringIO(text))


def _parts(config: DictConfig, path: Path, readers: tuple[Path, ...]) -> Iterator[DictConfig]:
    """Yield the parts of a file, later parts overriding earlier ones."""
    defaults = config.pop("defaults", [])
    names = [str(name) for name in defaults]
    for name in names:
        if name == "_self_":
            yield config
        else:
            yield _read_file(_find(name, path.parent), (*readers, path))
    if "_self_" not in names:
        yield config


def _overridden(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    problems = [p for override in overrides if (p := _override(config, override))]
    if problems:
        raise SpecError(problems)
    return config


def _override(config: DictConfig, override: str) -> str | None:
    """Apply one override in place; return an error message, or None."""
    key, equals, value = override.lstrip("+").partition("=")
    if key.startswith("~"):
        try:
            return _take_out(config, key[1:])
        except (OmegaConfBaseException, *_OF_KEYS) as error:
            return f"comgra: {key!r} cannot be removed: {_first_line(error)}"
    if not equals or not key:
        return f"comgra: override {override!r} must look like 'schedule.every=10'"
    try:
        change = OmegaConf.from_dotlist([f"{key}={value}"])
        config.merge_with(change)
    except (YAMLError, OmegaConfBaseException, *_OF_KEYS) as error:
        return f"comgra.{key}: {value!r} cannot be read as YAML: {_first_line(error)}"
    return None


_OF_KEYS = (ValueError, TypeError, AttributeError, AssertionError, IndexError, RecursionError)
"""Exceptions that OmegaConf may raise for malformed keys, such as "a..b" and "a[". """


def _take_out(config: DictConfig, key: str) -> str | None:
    if _taken_out(config, key):
        return None
    parent, _, name = key.rpartition(".")
    mapping = OmegaConf.select(config, parent) if parent else config
    known = [str(k) for k in mapping] if isinstance(mapping, DictConfig) else []
    return f"comgra: cannot remove {key!r}, which does not exist{did_you_mean(name, known)}"


def _taken_out(config: DictConfig, key: str) -> bool:
    """Remove an entry in place; return whether it existed."""
    parent, _, name = key.rpartition(".")
    mapping = OmegaConf.select(config, parent) if parent else config
    if not isinstance(mapping, DictConfig) or name not in set(mapping):
        return False
    del mapping[name]
    return True


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
