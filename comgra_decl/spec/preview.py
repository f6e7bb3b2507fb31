"""Small previews of tensors that are recorded without their values."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from comgra_decl.spec.base import Int, SpecModel


class PreviewSpec(SpecModel):
    """How often to keep a small preview of each recorded tensor.

    A preview has at most 4096 bytes. It contains the first samples and the first entries along axes
    such as `channel`, `head`, `feature` and `position`; axes such as `height`, `width`, `query` and
    `key` are averaged. Tensors that are recorded with their values have no preview.
    """

    every: Annotated[Int, Field(ge=1)] = 50
    """Interval between records with previews, counted in captured records; training and evaluation
    records are counted separately.
    """


def _switched(value: Any) -> Any:
    return None if value is False else {} if value is True else value


Previewing = Annotated[PreviewSpec | None, BeforeValidator(_switched)]
