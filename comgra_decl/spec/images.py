"""How tensors that are normalised images are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from comgra_decl.records import Normalised
from comgra_decl.spec.base import Number, SpecModel


class ImageSpec(SpecModel):
    """How to turn a normalised image back into a viewable one: `value * std + mean` is in 0..1."""

    mean: Annotated[list[Number], Field(min_length=1)] = [0.0]
    """The mean that was subtracted, for each channel or for all."""

    std: Annotated[list[Annotated[Number, Field(gt=0)]], Field(min_length=1)] = [1.0]
    """The standard deviation by which values were divided, for each channel or for all."""

    @model_validator(mode="after")
    def _of_the_same_channels(self) -> ImageSpec:
        if len({len(self.mean), len(self.std)} - {1}) > 1:
            raise ValueError(
                f"mean has {len(self.mean)} numbers and std {len(self.std)}; each must have one, "
                "or one for each channel"
            )
        return self

    def misfit(self, shape: Sequence[int]) -> str | None:
        """Return why these numbers do not fit images; None if they do, or if they are no images.

        Args:
            shape: [samples, channels, height, width] or [samples, height, width, channels].
        """
        given = max(len(self.mean), len(self.std))
        if len(shape) != 4 or given in (1, shape[1], shape[3]):
            return None
        return (
            f"`image` has {given} means or standard deviations, but the input {list(shape)} has "
            f"{shape[1]} channels, so it is shown as it is; give one number, or one for each "
            "channel"
        )

    @property
    def normalised(self) -> Normalised:
        """The same numbers, as they are stored with a tensor."""
        return Normalised(tuple(map(float, self.mean)), tuple(map(float, self.std)))
