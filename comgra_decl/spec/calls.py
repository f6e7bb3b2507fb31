"""Apply a spec to function calls and to tensors named by the program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from comgra_decl.spec.globs import compile_text, matches
from comgra_decl.spec.model import Spec
from comgra_decl.spec.nodes import NodeSpec, Selector
from comgra_decl.spec.selectors import Capture, ModuleFacts, is_selected


@dataclass(frozen=True)
class CallRule:
    """One function selected by one entry.

    Attributes:
        entry: the entry's name.
        function: the function's full dotted name.
        within: globs over module paths. Only calls inside a matching module are selected; if empty,
            calls anywhere are.
        optional: whether it may never be called.
    """

    entry: str
    function: str
    within: tuple[str, ...]
    optional: bool = False


def call_rules(spec: Spec) -> list[CallRule]:
    """Return a rule for every function that the spec selects, in the order of the entries."""
    return [
        CallRule(name, function, tuple(selector.within), entry.optional)
        for name, entry in spec.nodes.items()
        for selector in entry.select
        for function in selector.function
    ]


def calls_inside(spec: Spec, rules: Iterable[CallRule], module: ModuleFacts) -> dict[str, Capture]:
    """Return what to capture from calls made inside a module, keyed by function.

    `exclude` also excludes the calls made inside the modules that it matches.
    """
    captures: dict[str, Capture] = {}
    for rule in rules:
        entry = spec.nodes[rule.entry]
        placed = not rule.within or any(matches(glob, module.path) for glob in rule.within)
        if placed and not is_selected([*spec.exclude, *entry.exclude], module):
            known = captures.get(rule.function, Capture())
            captures[rule.function] = known.refined(rule.entry, entry)
    return captures


def calls_outside(spec: Spec, rules: Iterable[CallRule]) -> dict[str, Capture]:
    """Return what to capture from calls made outside any module, keyed by function."""
    captures: dict[str, Capture] = {}
    for rule in rules:
        if not rule.within:
            known = captures.get(rule.function, Capture())
            captures[rule.function] = known.refined(rule.entry, spec.nodes[rule.entry])
    return captures


def named_tensor(spec: Spec, name: str) -> Capture | None:
    """Return what to capture for a tensor that the program named `name`; None if nothing.

    Combines all entries that select the name. If there are none and `annotations` is on, captures
    the output and its gradient, and its values if any entry keeps values.
    """
    if any(_names(selector, name) for selector in spec.exclude):
        return None
    capture: Capture | None = None
    for key, entry in spec.nodes.items():
        if _selects_name(entry, name):
            capture = (capture or Capture()).refined(key, entry)
    if capture is not None or not spec.annotations:
        return capture
    values = any(entry.values for entry in spec.nodes.values())
    return Capture(output=True, output_grad=True, values=values)


def _selects_name(entry: NodeSpec, name: str) -> bool:
    chosen = any(_names(selector, name) for selector in entry.select)
    return chosen and not any(_names(selector, name) for selector in entry.exclude)


def _names(selector: Selector, name: str) -> bool:
    """Return whether a selector selects tensors named `name`, which have no path or class."""
    if selector.path or selector.class_ or selector.regex:
        return False
    return any(compile_text(pattern).fullmatch(name) for pattern in selector.annotation)
