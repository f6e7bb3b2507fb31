"""Name modules and parameters as the run does, including those that are not recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from comgra_decl.hooks.module_tree import Top, named_modules, unwrapped_class

Naming = Callable[[nn.Module], tuple[str, nn.Module] | None]
"""Returns a module's node and the outermost module that contains it; None if it is unknown."""


class Names:
    """Names of modules and parameters.

    Args:
        naming: names the modules that the run knows.
    """

    def __init__(self, naming: Naming) -> None:
        self._naming = naming
        self._tops: dict[int, tuple[nn.Module, dict[int, str]]] = {}
        self._parameters: dict[int, tuple[str, Tensor]] = {}

    def module(self, module: nn.Module, *, within: nn.Module) -> str:
        """Return the node of a module.

        Args:
            module: the module.
            within: a module that contains it and names it if the run does not know it.
        """
        known = self._naming(module)
        if known is not None:
            self._take_in(known[1])
            return known[0]
        nodes = self._take_in(within)
        return nodes.get(id(module)) or unwrapped_class(module)

    def parameter(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter of any module seen so far."""
        known = self._parameters.get(id(tensor))
        return None if known is None or known[1] is not tensor else known[0]

    def parameters_of(self, module: nn.Module, node: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers that a module itself holds, with their names."""
        for held in (module._parameters, module._buffers):
            for attribute, tensor in held.items():
                if tensor is not None:
                    yield f"{node}.{attribute}", tensor

    def look_at(self, module: nn.Module) -> None:
        """Register the parameters of a module and of all modules that contain it."""
        known = self._naming(module)
        self._take_in(module if known is None else known[1])

    def _take_in(self, top: nn.Module) -> dict[int, str]:
        known = self._tops.get(id(top))
        if known is not None:
            return known[1]
        naming = Top(top, lambda _: False)
        nodes: dict[int, str] = {}
        self._tops[id(top)] = top, nodes
        for path, module in named_modules(top):
            found = self._naming(module)
            nodes[id(module)] = naming.node(path) if found is None else found[0]
            for attribute, tensor in module._parameters.items():
                if tensor is not None:
                    self._parameters.setdefault(
                        id(tensor), (f"{nodes[id(module)]}.{attribute}", tensor)
                    )
        return nodes
