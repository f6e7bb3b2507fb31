"""Finds the modules that a spec means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from comgra_decl.spec.globs import compile_name, matches
from comgra_decl.spec.misses import explain_class_miss, explain_path_miss
from comgra_decl.spec.model import Spec
from comgra_decl.spec.nodes import NodeSpec, Selector


@dataclass(frozen=True)
class ModuleFacts:
    """What selectors know of a module: no torch here.

    Attributes:
        path: its name within the model, "blocks.0.attn"; "" for the root.
        classes: names of its class and those it derives from, most derived first.
    """

    path: str
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Capture:
    """What to capture of one module, as all entries that select it together say."""

    output: bool = False
    output_grad: bool = False
    parameter: bool = False
    parameter_grad: bool = False
    values: bool = False
    batch_dim: Literal["auto"] | int | None = "auto"
    entries: tuple[str, ...] = ()

    def refined(self, name: str, entry: NodeSpec) -> Capture:
        """Returns this and what `entry`, called `name`, adds to it."""
        return replace(
            self,
            **dict.fromkeys(entry.capture, True),
            values=self.values or entry.values,
            batch_dim=self.batch_dim if entry.batch_dim == "auto" else entry.batch_dim,
            entries=(*self.entries, name),
        )


@dataclass(frozen=True)
class Selection:
    """What a spec means on a given model.

    Attributes:
        captures: what to capture, by module path, in the order of the modules.
        matched: the module paths that each entry of `nodes` selects.
        unmatched: a sentence for every pattern that selects nothing, with what is near it.
    """

    captures: dict[str, Capture] = field(default_factory=dict)
    matched: dict[str, list[str]] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)


def select(spec: Spec, modules: Iterable[ModuleFacts]) -> Selection:
    """Returns what `spec` captures of `modules`."""
    facts = list(modules)
    matched = {name: _matched(entry, spec.exclude, facts) for name, entry in spec.nodes.items()}
    captures: dict[str, Capture] = {}
    for name, paths in matched.items():
        for path in paths:
            captures[path] = captures.get(path, Capture()).refined(name, spec.nodes[name])
    return Selection(
        captures={m.path: captures[m.path] for m in facts if m.path in captures},
        matched=matched,
        unmatched=[*_unmatched(spec, facts)],
    )


def _matched(entry: NodeSpec, exclude: list[str], modules: list[ModuleFacts]) -> list[str]:
    chosen = [m.path for m in modules if any(_selects(s, m) for s in entry.select)]
    return [p for p in chosen if not _at_any([*exclude, *entry.exclude], p)]


def _selects(selector: Selector, module: ModuleFacts) -> bool:
    by_path = not selector.path or _at_any(selector.path, module.path)
    by_class = not selector.class_ or any(_is_class(name, module) for name in selector.class_)
    return by_path and by_class


def _at_any(globs: Iterable[str], path: str) -> bool:
    return any(matches(glob, path) for glob in globs)


def _is_class(pattern: str, module: ModuleFacts) -> bool:
    regex = compile_name(pattern)
    return any(regex.fullmatch(name) for name in module.classes)


def _unmatched(spec: Spec, modules: list[ModuleFacts]) -> Iterator[str]:
    paths = [m.path for m in modules]
    if not spec.nodes:
        yield "comgra.nodes: is empty, so no module is recorded; try 'all: {select: \"**\"}'"
    for name, entry in spec.nodes.items():
        for selector in entry.select:
            for sentence in _selector_misses(selector, modules):
                yield f"comgra.nodes.{name}.select: {sentence}"
        yield from _all_excluded(name, entry, spec, modules)
        yield from _glob_misses(f"comgra.nodes.{name}.exclude", entry.exclude, paths)
    yield from _glob_misses("comgra.exclude", spec.exclude, paths)


def _glob_misses(where: str, globs: list[str], paths: list[str]) -> Iterator[str]:
    for glob in globs:
        if not any(_at_any([glob], path) for path in paths):
            yield f"{where}: {explain_path_miss(glob, paths)}"


def _selector_misses(selector: Selector, modules: list[ModuleFacts]) -> Iterator[str]:
    """Yields a sentence for each pattern of `selector` that nothing fits."""
    for glob in selector.path:
        if not any(_at_any([glob], m.path) for m in modules):
            yield explain_path_miss(glob, [m.path for m in modules])
    candidates = [m for m in modules if not selector.path or _at_any(selector.path, m.path)]
    if not candidates:
        return
    for name in selector.class_:
        if not any(_is_class(name, m) for m in candidates):
            yield explain_class_miss(name, selector.path, [m.classes for m in candidates])


def _all_excluded(
    name: str, entry: NodeSpec, spec: Spec, modules: list[ModuleFacts]
) -> Iterator[str]:
    count = sum(any(_selects(s, m) for s in entry.select) for m in modules)
    if count and not _matched(entry, spec.exclude, modules):
        yield f"comgra.nodes.{name}: selects {count} modules, but 'exclude' leaves out all of them"
