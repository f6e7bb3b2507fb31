"""Detect modules that are called within a model but not registered in it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from comgra_decl.hooks.tensors.shards import class_of

if TYPE_CHECKING:
    from torch import nn

    from comgra_decl.hooks.module_tree import Owners

_STRAYS = (
    "called inside a model but not registered in it: {}. Such a module is kept in a plain list or "
    "dict (use nn.ModuleList or nn.ModuleDict), or is created in every call. Its parameters are "
    "missing from model.parameters(), so an optimizer built from those does not train them, and "
    "the module is not recorded"
)


class Strays:
    """Collects unregistered modules by class.

    If a module is created during a call and the model registers it in the same call, it does not
    count.

    Args:
        owners: the parent of each module.
    """

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._parts: dict[int, weakref.ref[nn.Module]] = {}
        self._seen: dict[str, weakref.ref[nn.Module]] = {}
        self._reported: set[str] = set()

    def know(self, parts: Iterable[weakref.ref[nn.Module]]) -> None:
        """Add modules that are parts of models."""
        for part in parts:
            module = part()
            if module is not None:
                self._parts[id(module)] = part

    def see(self, module: nn.Module) -> None:
        """Note the call to an unrecorded module, if the module itself has parameters."""
        part = self._parts.get(id(module))
        if part is not None and part() is module:
            return
        name = class_of(module).__name__
        if name not in self._seen and any(p is not None for p in module._parameters.values()):
            self._seen[name] = weakref.ref(module)

    def sentence(self) -> str:
        """Return a warning about new unregistered modules; empty if there are none."""
        if self._seen.keys() <= self._reported:  # nearly always
            return ""
        new = sorted(name for name in self._seen.keys() - self._reported if self._is_stray(name))
        self._reported.update(self._seen)
        return _STRAYS.format(", ".join(new)) if new else ""

    def _is_stray(self, name: str) -> bool:
        module = self._seen[name]()
        return module is None or self._owners.top_of(module) is module
