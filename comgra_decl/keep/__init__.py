"""Decide after each step whether to store it, using triggers and a ring of earlier steps."""

from comgra_decl.keep.finding_ring import Request
from comgra_decl.keep.keeper import Keeper
from comgra_decl.keep.step_numbers import StepView

__all__ = ["Keeper", "Request", "StepView"]
