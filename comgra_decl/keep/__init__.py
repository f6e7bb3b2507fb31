"""Decides after each step whether it is stored: triggers, and the ring of steps before them."""

from comgra_decl.keep.keeper import Keeper
from comgra_decl.keep.look import StepView
from comgra_decl.keep.second import Request

__all__ = ["Keeper", "Request", "StepView"]
