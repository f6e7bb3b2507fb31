"""Attach to a running script, follow its steps, capture tensors and their dependencies."""

from comgra_decl.hooks.manager import HookManager

__all__ = ["HookManager"]
