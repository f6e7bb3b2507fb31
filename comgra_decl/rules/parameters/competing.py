"""Parameters that two optimizers update for different losses."""

from __future__ import annotations

from comgra_decl.rules.api import Finding, Place, Rule, Scene


class CompetingOptimizers(Rule):
    """Two optimizers that both update the parameters of one model."""

    name = "competing_optimizers"
    severity = "hint"
    certainty = 0.8
    definition = (
        "Several optimizers contain all trainable parameters of a model, and one of them also "
        "contains parameters that another one lacks. An optimizer and its wrapper are not counted "
        "as two, because they contain the same parameters. This is only a hint, because the losses "
        "need not oppose each other: an adversarial autoencoder trains its encoder for two losses."
    )
    source = (
        "Our own definition. An example is a GAN whose discriminator optimizer also contains the "
        "generator's parameters."
    )
    advice = (
        "Pass only a model's own parameters to its optimizer, and detach what the other model "
        "returns (`fake.detach()`)."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first model with competing optimizers."""
        held: dict[str, list[frozenset[int]]] = {}
        model = ""
        for module in scene.documents.get("modules") or []:
            model = str(module["node"]) if not module["path"] else model
            for facts in module["parameters"].values():
                if facts.get("trainable") and facts.get("optimized"):
                    held.setdefault(model, []).append(frozenset(facts.get("holders", ())))
        for name, sets in held.items():
            common = frozenset.intersection(*sets)
            others = {h for other, its in held.items() if other != name for h in its}
            if len(common) < 2 or not any(0 < len(o & common) < len(common) for o in others):
                continue
            return [
                self.finding(
                    scene,
                    place=Place(name),
                    first_step=0,
                    message=f"{len(common)} optimizers contain the parameters of {name}, and one "
                    "of them also trains another model. Each step of that optimizer also updates "
                    f"{name}, to reduce a loss that may oppose its own.",
                    evidence={"optimizers": len(common), "parameters": len(sets)},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return None if scene.documents.get("modules") else "the run has no list of modules"
