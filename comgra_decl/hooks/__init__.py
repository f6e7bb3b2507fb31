"""Hooks that follow the steps of a running program and capture tensors and their dependencies."""

from comgra_decl.hooks.manager import HookManager

__all__ = ["HookManager"]
