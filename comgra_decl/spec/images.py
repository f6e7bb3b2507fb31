"""How tensors that are normalised images are shown."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from comgra_decl.records import Normalised
from comgra_decl.spec.base import Number, SpecModel


class ImageSpec(SpecModel):
    """How to turn a normalised image back into a viewable one: `value * std + mean` is in 0..1."""

    mean: Annotated[list[Number], Field(min_length=1)] = [0.0]
    """The mean that was subtracted, for each channel or for all."""

    std: Annotated[list[Number], Field(min_length=1)] = [1.0]
    """The standard deviation by which values were divided, for each channel or for all."""

    @property
    def normalised(self) -> Normalised:
        """The same numbers, as they are stored with a tensor."""
        return Normalised(tuple(map(float, self.mean)), tuple(map(float, self.std)))
