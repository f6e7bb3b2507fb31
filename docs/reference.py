"""Generate `reference.md` from the code: `python -m docs.reference`.

The page consists of docstrings. If a public object has no docstring, an error names the object.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from comgra_decl.spec.base import SpecModel
from comgra_decl.spec.described import descriptions
from comgra_decl.spec.loading import presets
from comgra_decl.spec.model import Spec

PAGE = Path(__file__).with_name("reference.md")

FORMULAS = (
    "comgra_decl.stats.statistics",
    "comgra_decl.stats.measures",
    "comgra_decl.stats.spectral",
    "comgra_decl.query.derived",
)
"""Modules whose docstrings define statistics."""

CLASSES = (
    "comgra_decl.query.Run",
    "comgra_decl.query.checkpoints.Checkpoint",
    "comgra_decl.query.plane.Plane",
    "comgra_decl.doors.look.Look",
    "comgra_decl.query.Ending",
    "comgra_decl.query.Slot",
    "comgra_decl.query.preview.Preview",
    "comgra_decl.records.Axis",
    "comgra_decl.viewer.plotting.RunPlots",
    "comgra_decl.viewer.plotting.SlotPlots",
    "comgra_decl.viewer.plotting.GroupPlots",
    "comgra_decl.query.arrays.Arrays",
    "comgra_decl.query.arrays.Rows",
    "comgra_decl.query.arrays.Heat",
    "comgra_decl.query.Group",
    "comgra_decl.query.RunSummary",
    "comgra_decl.keep.StepView",
    "comgra_decl.record.session.Session",
)
"""Classes that users receive but do not construct."""

HEAD = """\
# Reference

This page lists all keys of the spec, statistics, commands, functions and classes. It is generated
from the code by `python -m docs.reference`; a test fails if the page is out of date.

[Keys of the spec](#keys-of-the-spec) · [Statistics](#statistics) · [Presets](#presets) ·
[Commands](#commands) · [Environment](#environment) · [Functions](#functions) ·
[Classes](#classes)
"""

ENVIRONMENT = """\
- **`COMGRA`**: a preset or a YAML file; if set, any program that imports torch is recorded.
- **`COMGRA_OVERRIDES`**: overrides of this spec, such as `schedule.every=10 run.root=/data/runs`.
- **`COMGRA_VIEW_AUTH`**: the value of `comgra-decl view --basic-auth`, hidden from process lists.

Tables respect `COLUMNS`, `NO_COLOR` and similar variables. A spec may read any variable with
`${oc.env:NAME}`; the run stores this expression, not the variable's value. Numbers and choices are
stored as values.
"""


class UndocumentedError(Exception):
    """Raised if a public object has no docstring; the message is the name of the object."""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())
    sys.stdout.write(f"wrote {PAGE}\n")


def page() -> str:
    """Return the whole page.

    Raises:
        UndocumentedError: If a public object has no docstring.
    """
    parts = [
        HEAD,
        *_section("Keys of the spec", _spec()),
        *_section("Statistics", _statistics()),
        *_section("Presets", _presets()),
        *_section("Commands", _commands()),
        *_section("Environment", [ENVIRONMENT]),
        *_section("Functions", _functions()),
        *_section("Classes", _classes()),
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _section(heading: str, parts: Any) -> Iterator[str]:
    yield f"## {heading}"
    yield from parts


# -- the spec --------------------------------------------------------------------------------------


def models() -> list[type[SpecModel]]:
    """Return all models of the spec, in order of first use."""
    found: dict[type[SpecModel], None] = {}

    def visit(model: type[SpecModel]) -> None:
        if model in found:
            return
        found[model] = None
        for field in model.model_fields.values():
            for part in _models_in(field.annotation):
                visit(part)

    visit(Spec)
    return list(found)


def _models_in(annotation: Any) -> Iterator[type[SpecModel]]:
    if isinstance(annotation, type) and issubclass(annotation, SpecModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _spec() -> Iterator[str]:
    for model in models():
        yield f"### {model.__name__}"
        yield _doc(model, model.__name__)
        for name, field in model.model_fields.items():
            yield _key(model, name, field)


def _key(model: type[SpecModel], name: str, field: FieldInfo) -> str:
    about = descriptions(model).get(name)
    if not about:
        raise UndocumentedError(f"{model.__name__}.{name}")
    default = "required" if field.is_required() else _default(field)
    text = "\n".join(f"  {line}".rstrip() for line in about.splitlines())
    return f"- **`{field.alias or name}`**: {_type(field.annotation)}, {default}\n\n{text}"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    if not isinstance(value, SpecModel):
        return f"default `{_yaml(value)}`"
    changed = value.model_dump(mode="json", exclude_defaults=True)
    return f"default `{_yaml(changed)}`" if changed else "with its own defaults"


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def _type(annotation: Any) -> str:
    """Return a description of a type in terms of YAML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(part) for part in arguments))
    if origin is list:
        return f"list of ({_type(arguments[0])})"
    if origin is dict:
        return f"mapping of names to ({_type(arguments[1])})"
    if isinstance(annotation, type) and issubclass(annotation, SpecModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return _NAMES[annotation]


_NAMES: dict[Any, str] = {
    int: "integer",
    float: "number",
    bool: "`true` or `false`",
    str: "string",
    type(None): "`null`",
    Any: "anything",
}


# -- statistics, presets, commands -----------------------------------------------------------------


def _statistics() -> Iterator[str]:
    for name in FORMULAS:
        yield _doc(importlib.import_module(name), name)


def _presets() -> Iterator[str]:
    for name, path in presets().items():
        lines = path.read_text().splitlines()
        comments = [line.removeprefix("#").strip() for line in lines if line.startswith("# ")]
        shown = [comment for comment in comments if not comment.startswith("@package")]
        if not shown:
            raise UndocumentedError(f"preset {name}")
        yield f"### `{name}`"
        yield "\n".join(shown)


def _commands() -> Iterator[str]:
    from typer.main import get_command

    from comgra_decl.cli.commands import plan
    from comgra_decl.cli.main import app
    from comgra_decl.doors import script

    usages = {"plan": plan.USAGE, "run": script.USAGE}
    for name, command in sorted(get_command(app).commands.items()):  # type: ignore[attr-defined]
        if not command.help:
            raise UndocumentedError(f"command {name}")
        yield f"### `comgra-decl {name}`"
        yield command.help
        if name in usages:
            yield f"```text\n{usages[name]}```"
        else:
            yield "\n".join(_parameter(name, parameter) for parameter in command.params)


def _parameter(command: str, parameter: Any) -> str:
    names = " ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if not parameter.help:
        raise UndocumentedError(f"command {command}, {names}")
    shown = f"`{parameter.name.upper()}`" if parameter.param_type_name == "argument" else names
    default = f" Default: `{parameter.default}`." if parameter.default is not None else ""
    return f"- {shown}: {parameter.help}{default}"


# -- functions and classes -------------------------------------------------------------------------


def _functions() -> Iterator[str]:
    import comgra_decl

    for name in sorted(comgra_decl.__all__, key=str.lower):
        value = getattr(comgra_decl, name)
        yield f"### `comgra_decl.{name}`"
        if inspect.isclass(value):
            yield _doc(value, name)
        else:
            yield _function(value, name)


def _classes() -> Iterator[str]:
    for path in CLASSES:
        module, _, name = path.rpartition(".")
        cls = getattr(importlib.import_module(module), name)
        yield f"### `{name}`"
        yield _doc(cls, name)
        for member, value in _members(cls):
            yield f"#### `{name}.{member}`"
            if isinstance(value, property):
                yield _doc(value, f"{name}.{member}")
            else:
                yield _function(value, f"{name}.{member}")


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public members of a class, beginning with those of its comgra_decl bases."""
    bases = [base for base in reversed(cls.__mro__) if base.__module__.startswith("comgra_decl.")]
    offered = {name: value for base in bases for name, value in vars(base).items()}
    for name, value in offered.items():
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            yield name, value


def _function(function: Callable[..., Any], name: str) -> str:
    signature = str(inspect.signature(function)).replace("self, ", "").replace("(self)", "()")
    short = name.rpartition(".")[2]
    return f"```text\n{short}{signature.replace(chr(39), '')}\n```\n\n{_doc(function, name)}"


def _doc(value: Any, name: str) -> str:
    doc = inspect.getdoc(value)
    if not doc:
        raise UndocumentedError(name)
    return _headed(doc)


def _headed(doc: str) -> str:
    """Return a Google-style docstring as Markdown."""
    lines = []
    for line in doc.splitlines():
        if line in ("Args:", "Returns:", "Raises:", "Yields:", "Attributes:"):
            lines += [f"**{line[:-1]}**", ""]
        else:
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
