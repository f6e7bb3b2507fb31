"""What a spec means for calls of functions and for tensors that the program names: no modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from comgra_decl.spec.globs import compile_text, matches
from comgra_decl.spec.model import Spec
from comgra_decl.spec.nodes import NodeSpec, Selector
from comgra_decl.spec.selectors import Capture, ModuleFacts, is_selected


@dataclass(frozen=True)
class CallRule:
    """One function that one entry selects.

    Attributes:
        entry: the entry's name.
        function: the function's full dotted name.
        within: globs over the paths of modules inside which calls are meant; none means anywhere.
    """

    entry: str
    function: str
    within: tuple[str, ...]


def call_rules(spec: Spec) -> list[CallRule]:
    """Returns every function that the spec selects, by entry, in order."""
    return [
        CallRule(name, function, tuple(selector.within))
        for name, entry in spec.nodes.items()
        for selector in entry.select
        for function in selector.function
    ]


def calls_inside(spec: Spec, rules: Iterable[CallRule], module: ModuleFacts) -> dict[str, Capture]:
    """Returns what to capture of calls made inside a module, by function.

    What `exclude` leaves out as a module is left out as a place of calls too.
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
    """Returns what to capture of calls made outside any module, by function."""
    captures: dict[str, Capture] = {}
    for rule in rules:
        if not rule.within:
            known = captures.get(rule.function, Capture())
            captures[rule.function] = known.refined(rule.entry, spec.nodes[rule.entry])
    return captures


def named_tensor(spec: Spec, name: str) -> Capture | None:
    """Returns what to capture of a tensor that the program calls `name`; None for nothing.

    Entries that select the name say it together. Without one it is the output and its gradient, if
    `annotations` is on; its values are then kept if any entry keeps some.
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
    """Whether a selector means tensors called `name`, which have no path and no class."""
    if selector.path or selector.class_ or selector.regex:
        return False
    return any(compile_text(pattern).fullmatch(name) for pattern in selector.annotation)
