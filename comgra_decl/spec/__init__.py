"""The spec: what to capture, when, and how to reduce it."""

from comgra_decl.spec.loading import load_spec
from comgra_decl.spec.model import Spec
from comgra_decl.spec.scheduler import Scheduler
from comgra_decl.spec.selectors import Capture, ModuleFacts, Selection, select

__all__ = [
    "Capture",
    "ModuleFacts",
    "Scheduler",
    "Selection",
    "Spec",
    "load_spec",
    "select",
]
