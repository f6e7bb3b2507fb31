"""Find the modules that a spec selects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from comgra_decl.spec.functions import AttentionSpec, SplitSpec
from comgra_decl.spec.globs import compile_name, compile_text, matches
from comgra_decl.spec.images import ImageSpec
from comgra_decl.spec.misses import (
    explain_annotation_miss,
    explain_class_miss,
    explain_path_miss,
    explain_regex_miss,
)
from comgra_decl.spec.model import Spec
from comgra_decl.spec.nodes import NodeSpec, Selector, compile_regex


@dataclass(frozen=True)
class ModuleFacts:
    """The facts about a module that selectors use; independent of torch.

    Attributes:
        path: its path within the model, "blocks.0.attn"; "" for the root.
        classes: names of its class and base classes, most derived first.
        annotation: the name that `@comgra.node` gives its `forward`; "" if it has none.
    """

    path: str
    classes: tuple[str, ...]
    annotation: str = ""


@dataclass(frozen=True)
class Capture:
    """What to capture from one module, combined from all entries that select it."""

    output: bool = False
    output_grad: bool = False
    input: bool = False
    input_grad: bool = False
    parameter: bool = False
    parameter_grad: bool = False
    parameter_grad_raw: bool = False
    update: bool = False
    buffer: bool = False
    optimizer_state: bool = False
    values: bool = False
    batch_dim: Literal["auto"] | int | None = "auto"
    axes: tuple[str, ...] = ()
    image: ImageSpec | None = None
    split: SplitSpec | None = None
    attention: AttentionSpec | None = None
    entries: tuple[str, ...] = ()

    def refined(self, name: str, entry: NodeSpec) -> Capture:
        """Return this capture extended by `entry`, whose name is `name`."""
        return replace(
            self,
            **dict.fromkeys(entry.capture, True),
            values=self.values or entry.values,
            batch_dim=self.batch_dim if entry.batch_dim == "auto" else entry.batch_dim,
            axes=tuple(entry.axes or self.axes),
            image=entry.image or self.image,
            split=entry.split or self.split,
            attention=entry.attention or self.attention,
            entries=(*self.entries, name),
        )


@dataclass(frozen=True)
class Selection:
    """What a spec selects in a given model.

    Attributes:
        captures: what to capture, by module path, in the order of the modules.
        matched: the module paths that each entry of `nodes` selects.
        unmatched: a sentence, with similar names, for every pattern that selects nothing.
        unmarked: a sentence for every annotation that no module has, keyed by pattern. The
            annotations of tensors become known only while the program runs.
    """

    captures: dict[str, Capture] = field(default_factory=dict)
    matched: dict[str, list[str]] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)
    unmarked: dict[str, str] = field(default_factory=dict)


def select(spec: Spec, modules: Iterable[ModuleFacts]) -> Selection:
    """Return what `spec` captures from `modules`."""
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
        unmarked=_unmarked(spec, facts),
    )


def _matched(entry: NodeSpec, exclude: list[Selector], modules: list[ModuleFacts]) -> list[str]:
    without = [*exclude, *entry.exclude]
    return [m.path for m in modules if is_selected(entry.select, m) and not is_selected(without, m)]


def is_selected(selectors: Iterable[Selector], module: ModuleFacts) -> bool:
    """Return whether any of the selectors selects the module."""
    return any(_selects(selector, module) for selector in selectors)


def _selects(selector: Selector, module: ModuleFacts) -> bool:
    if selector.function:
        return False  # selects calls, which `hooks.functions` records
    return (
        _is_placed(selector, module)
        and (not selector.class_ or any(_is_class(name, module) for name in selector.class_))
        and (not selector.annotation or any(_is_marked(a, module) for a in selector.annotation))
    )


def _is_placed(selector: Selector, module: ModuleFacts) -> bool:
    """Return whether the module's path matches the selector; its other criteria are ignored."""
    by_path = not selector.path or _at_any(selector.path, module.path)
    return by_path and (not selector.regex or any(_fits(r, module.path) for r in selector.regex))


def _fits(regex: str, path: str) -> bool:
    return compile_regex(regex).fullmatch(path) is not None


def _is_marked(pattern: str, module: ModuleFacts) -> bool:
    return (
        bool(module.annotation) and compile_text(pattern).fullmatch(module.annotation) is not None
    )


def _at_any(globs: Iterable[str], path: str) -> bool:
    return any(matches(glob, path) for glob in globs)


def _is_class(pattern: str, module: ModuleFacts) -> bool:
    regex = compile_name(pattern)
    return any(regex.fullmatch(name) for name in module.classes)


def _unmatched(spec: Spec, modules: list[ModuleFacts]) -> Iterator[str]:
    if not spec.nodes:
        yield "comgra.nodes: is empty, so no module is recorded; try 'all: {select: \"**\"}'"
    for name, entry in spec.nodes.items():
        if not entry.optional:
            yield from misses(f"comgra.nodes.{name}.select", entry.select, modules)
            yield from _all_excluded(name, entry, spec, modules)
        yield from misses(f"comgra.nodes.{name}.exclude", entry.exclude, modules)
    yield from misses("comgra.exclude", spec.exclude, modules)


def misses(where: str, selectors: list[Selector], modules: list[ModuleFacts]) -> Iterator[str]:
    """Yield a sentence, with similar names, for each pattern that matches none of the modules."""
    for selector in selectors:
        for sentence in _selector_misses(selector, modules):
            yield f"{where}: {sentence}"


def _selector_misses(selector: Selector, modules: list[ModuleFacts]) -> Iterator[str]:
    """Yield a sentence for each pattern of `selector` that matches nothing."""
    paths = [m.path for m in modules]
    for glob in (*selector.path, *selector.within):
        if not _at_path(glob, paths):
            yield explain_path_miss(glob, paths)
    for regex in selector.regex:
        if not any(_fits(regex, path) for path in paths):
            yield explain_regex_miss(regex, paths)
    candidates = [m for m in modules if _is_placed(selector, m)]
    if not candidates:
        return
    for name in selector.class_:
        if not any(_is_class(name, m) for m in candidates):
            places = [*selector.path, *selector.regex]
            yield explain_class_miss(name, places, [m.classes for m in candidates])


def _at_path(glob: str, paths: Iterable[str]) -> bool:
    return any(matches(glob, path) for path in paths)


def _unmarked(spec: Spec, modules: list[ModuleFacts]) -> dict[str, str]:
    """Return a sentence for each annotation of an entry that no module has."""
    marks = [m.annotation for m in modules if m.annotation]
    return {
        pattern: f"comgra.nodes.{name}.select: {explain_annotation_miss(pattern, marks)}"
        for name, entry in spec.nodes.items()
        for selector in entry.select
        for pattern in selector.annotation
        if not any(_is_marked(pattern, m) for m in modules)
    }


def _all_excluded(
    name: str, entry: NodeSpec, spec: Spec, modules: list[ModuleFacts]
) -> Iterator[str]:
    count = sum(any(_selects(s, m) for s in entry.select) for m in modules)
    if count and not _matched(entry, spec.exclude, modules):
        yield f"comgra.nodes.{name}: selects {count} modules, but 'exclude' excludes all of them"
