"""Which steps are measured: where their time goes, and what holds their memory."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from comgra_decl.spec.base import Int, SpecModel

_MOST = 64


def _one_as_pair(steps: object) -> object:
    """Accept the number of a single step."""
    single = isinstance(steps, int) and not isinstance(steps, bool)
    return [steps, steps] if single else steps


def _window(steps: list[int]) -> list[int]:
    if len(steps) != 2 or steps[0] > steps[1]:
        raise ValueError(f"{steps} must be a pair of steps, [first, last]")
    if steps[1] - steps[0] >= _MOST:
        raise ValueError(f"{steps} contains more than {_MOST} steps")
    return steps


Steps = Annotated[
    list[Annotated[Int, Field(ge=0)]], BeforeValidator(_one_as_pair), AfterValidator(_window)
]


class ProfileSpec(SpecModel):
    """The steps in which torch's profiler runs. They are not recorded."""

    steps: Steps = [10, 13]
    """The first and the last profiled step, or the number of one step; at most 64 steps."""


class MemorySpec(SpecModel):
    """The steps in which the memory of each module is measured. They are not recorded."""

    steps: Steps = [10, 10]
    """The first and the last measured step, or the number of one step; at most 64 steps."""
