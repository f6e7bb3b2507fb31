"""Small pictures of all tensors whose values are not kept."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from comgra_decl.spec.base import Int, SpecModel


class PreviewSpec(SpecModel):
    """How often a small part of each recorded tensor is kept, so that it can be looked at.

    A preview has at most 4096 bytes. It holds the first samples, the first entries along axes such
    as `channel`, `head`, `feature` and `position`, and means along axes such as `height`, `width`,
    `query` and `key`. Tensors whose values the record keeps have none.
    """

    every: Annotated[Int, Field(ge=1)] = 20
    """Of how many captured records of training (and of evaluation) the first has previews."""


def _switched(value: Any) -> Any:
    return None if value is False else {} if value is True else value


Previewing = Annotated[PreviewSpec | None, BeforeValidator(_switched)]
