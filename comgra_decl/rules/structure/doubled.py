"""Concatenations of a tensor with itself."""

from __future__ import annotations

from comgra_decl.rules.api import Finding, Place, Rule, Scene, calls_missing

_FEW = 4  # channels; images of one channel are repeated for networks that expect three


class ConcatenatedWithItself(Rule):
    """Concatenations of a tensor with itself, where another tensor was probably intended."""

    name = "concatenated_with_itself"
    certainty = 0.75
    definition = (
        "Within a model, `cat` joins a tensor with a gradient only with itself, along a dimension "
        f"other than the batch with at least {_FEW} elements. The copies add nothing that the next "
        "layer could not compute from one of them. Fewer elements are ignored, because gray images "
        "are repeated for networks that expect three channels."
    )
    source = (
        "Ronneberger et al., U-Net (2015): the decoder concatenates its upsampled map with the "
        "encoder's map of the same size. Our own definition."
    )
    advice = (
        "Pass the tensor that is missing, such as the encoder's output in a skip connection: "
        "`torch.cat([x, skip], 1)`."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such concatenation."""
        found = [
            fact
            for fact in scene.told("doubled")
            if fact["dim"] > 0 and fact["shape"][fact["dim"]] >= _FEW
        ]
        if not found:
            return []
        fact = found[0]
        return [
            self.finding(
                scene,
                place=Place(str(fact.get("where") or "cat")),
                first_step=0,
                message=f"{fact['where']} concatenates a tensor of shape {fact['shape']} with "
                "itself: another tensor, such as a skip connection, was probably intended and is "
                "not used.",
                evidence={"shape": str(fact["shape"]), "copies": fact["count"]},
                also=len({each["where"] for each in found}) - 1,
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return calls_missing(scene)
