"""Reads a spec from a preset, a YAML file or a mapping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from comgra_decl.errors import SpecError, did_you_mean
from comgra_decl.spec.model import Spec
from comgra_decl.spec.problems import explain
from comgra_decl.spec.yaml_text import read_yaml_text

PRESET_FOLDER = Path(__file__).parents[1] / "configs" / "comgra"
"""Where the presets lie, in the package as in the repository."""

HYDRA_KEYS = ("_target_", "_recursive_", "_convert_", "_partial_", "_args_", "defaults")
"""Keys that tell Hydra what to do with a preset; no part of the spec."""


def presets() -> dict[str, Path]:
    """Returns the files of all shipped presets by name."""
    return {path.stem: path for path in sorted(PRESET_FOLDER.glob("*.yaml"))}


def load_spec(source: str | Path | Mapping[str, Any] | Spec, overrides: Sequence[str] = ()) -> Spec:
    """Returns the spec that `source` declares.

    Args:
        source: name of a preset, path of a YAML file, a mapping with the same keys, or a Spec. A
            file may begin with `defaults: [debug, _self_]` to extend a preset or another file.
        overrides: changes such as "schedule.every=10", "nodes.attn={select: '*.attn'}" or
            "~nodes.weights", which takes the key out.

    Raises:
        SpecError: it is wrong; carries every problem, one line each.
    """
    if isinstance(source, Spec) and not overrides:
        return source
    content, problems = _resolved(_overridden(_read(source), overrides))
    content = {k: _named(v) for k, v in content.items() if k not in HYDRA_KEYS}
    try:
        spec = Spec.model_validate(content)
    except ValidationError as error:
        problems += explain(error, Spec, content)
    if problems:
        raise SpecError(problems)
    return spec


def _resolved(config: DictConfig) -> tuple[dict[Any, Any], list[str]]:
    """Returns the content with all interpolations replaced, and what could not be replaced."""
    problems: list[str] = []
    prefix = config._get_full_key("")  # noqa: SLF001  (a part of a larger config has no other name)
    while True:
        try:
            content = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            key = (error.full_key or "").removeprefix(f"{prefix}.")
            problems.append(f"comgra.{key}: {_first_line(error)}")
            # Without the entry, what else is wrong can be found too.
            if not _taken_out(config, key.partition("[")[0]):
                raise SpecError(problems) from None
        else:
            assert isinstance(content, dict)
            return content, problems


def _named(content: Any) -> Any:
    """Returns the content with the key `on`, which YAML 1.1 reads as the truth value."""
    if isinstance(content, dict):
        return {"on" if key is True else key: _named(value) for key, value in content.items()}
    return [_named(value) for value in content] if isinstance(content, list) else content


def _read(source: str | Path | Mapping[str, Any] | Spec) -> DictConfig:
    if isinstance(source, Spec):
        return OmegaConf.create(source.model_dump(mode="json"))
    if isinstance(source, DictConfig):
        return source.copy()
    if isinstance(source, Mapping):
        return OmegaConf.create(dict(source))
    return _read_file(_find(source, Path()), ())


def _find(source: str | Path, folder: Path) -> Path:
    """Returns the file that `source` names; files are looked for in `folder`."""
    if str(source) in presets():
        return presets()[str(source)]
    for candidate in (folder / source, folder / f"{source}.yaml"):
        if candidate.is_file():
            return candidate
    names = ", ".join(presets())
    near = did_you_mean(str(source), presets())
    raise SpecError(
        [f"comgra: {str(source)!r} is neither a preset ({names}) nor a YAML file{near}"]
    )


def _read_file(path: Path, readers: tuple[Path, ...]) -> DictConfig:
    """Returns the content of a YAML file, merged with what its `defaults` name."""
    if path in readers:
        raise SpecError([f"comgra: {path} names itself in its 'defaults'"])
    try:
        config = OmegaConf.load(StringIO(read_yaml_text(path)))
    except RecursionError:
        raise SpecError([f"comgra: {path} cannot be read as YAML: it is nested too deep"]) from None
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise SpecError([f"comgra: {path} cannot be read as YAML: {error}"]) from None
    if not isinstance(config, DictConfig):
        raise SpecError([f"comgra: {path} is not a mapping of keys to values"])
    parts = _parts(config, path, readers)
    merged = OmegaConf.merge(*parts)
    assert isinstance(merged, DictConfig)
    return merged


def _parts(config: DictConfig, path: Path, readers: tuple[Path, ...]) -> Iterator[DictConfig]:
    """Yields what a file consists of, later parts overriding earlier ones."""
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
    """Applies one override in place; returns what is wrong with it, if anything."""
    key, equals, value = override.lstrip("+").partition("=")
    if key.startswith("~"):
        return _take_out(config, key[1:])
    if not equals or not key:
        return f"comgra: override {override!r} must look like 'schedule.every=10'"
    try:
        change = OmegaConf.from_dotlist([f"{key}={value}"])
        config.merge_with(change)
    except (YAMLError, OmegaConfBaseException) as error:
        return f"comgra.{key}: {value!r} cannot be read as YAML: {_first_line(error)}"
    return None


def _take_out(config: DictConfig, key: str) -> str | None:
    if _taken_out(config, key):
        return None
    parent, _, name = key.rpartition(".")
    mapping = OmegaConf.select(config, parent) if parent else config
    known = [str(k) for k in mapping] if isinstance(mapping, DictConfig) else []
    return f"comgra: there is no {key!r} to take out{did_you_mean(name, known)}"


def _taken_out(config: DictConfig, key: str) -> bool:
    """Takes an entry out in place; returns whether there was one."""
    parent, _, name = key.rpartition(".")
    mapping = OmegaConf.select(config, parent) if parent else config
    if not isinstance(mapping, DictConfig) or name not in set(mapping):
        return False
    del mapping[name]
    return True


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
