"""Parameters that are neither in a model nor in an optimizer."""

from __future__ import annotations

from comgra_decl.rules.api import Finding, Rule, Scene, loss_missing


class UnregisteredParameter(Rule):
    """Parameters that are neither in a model nor in an optimizer."""

    name = "unregistered_parameter"
    severity = "error"
    certainty = 0.85
    definition = (
        "In both of the first two records, tensors receive gradients, but they are neither "
        "parameters of a model that is called, nor inputs, nor in any optimizer that has stepped, "
        "and the program does not change them itself. They keep their initial values."
    )
    source = (
        "PyTorch's documentation of nn.Module and nn.ModuleList: modules in a plain list or dict "
        "are not registered, so `model.parameters()` does not contain their parameters."
    )
    advice = (
        "Put modules into nn.ModuleList or nn.ModuleDict instead of a list or dict, and tensors "
        "into nn.Parameter attributes or nn.ParameterList, or pass them to the optimizer."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about all such tensors."""
        for fact in scene.told("outside"):
            count = int(fact["count"])
            shapes = ", ".join(str(list(shape)) for shape in fact["shapes"])
            more = ", ..." if count > len(fact["shapes"]) else ""
            return [
                self.finding(
                    scene,
                    first_step=0,
                    message=f"{count} {'tensor' if count == 1 else 'tensors'} of shape {shapes}"
                    f"{more} receive gradients but are in no optimizer and in no model, so they "
                    "are never updated.",
                    evidence={"tensors": count},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return loss_missing(scene)


class UselessBackward(Rule):
    """Losses whose gradients reach no parameter of any optimizer."""

    name = "useless_backward"
    certainty = 0.8
    definition = (
        "`backward` is called on a loss in the first records, but no optimizer that has stepped "
        "holds any of the parameters that receive its gradients."
    )
    source = (
        "PyTorch's documentation of torch.optim: an optimizer updates the tensors it was given."
    )
    advice = (
        "Pass the parameters of the model that this loss trains to its optimizer, for example "
        "torch.optim.Adam(critic.parameters())."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such loss."""
        for fact in scene.told("trains nothing"):
            count = int(fact["count"])
            shapes = ", ".join(str(list(shape)) for shape in fact["shapes"])
            more = ", ..." if count > len(fact["shapes"]) else ""
            return [
                self.finding(
                    scene,
                    first_step=0,
                    message=f"A loss sends gradients to {count} parameters (of shape {shapes}"
                    f"{more}), but no optimizer holds any of them, so this loss trains nothing.",
                    evidence={"parameters": count},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return loss_missing(scene)


class RecreatedParameter(Rule):
    """Layers that are created anew in every step."""

    name = "recreated_parameter"
    certainty = 0.8
    definition = (
        "The loss of the first record depends on parameters (`nn.Parameter`) that no longer exist "
        "in the second record, and no optimizer has held them. They belong to a layer that is "
        "created when it is called."
    )
    source = "PyTorch's documentation of nn.Module: submodules are assigned in `__init__`."
    advice = "Create the layer once, in `__init__`, and call it in `forward`."

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about all such parameters."""
        for fact in scene.told("recreated"):
            count = int(fact["count"])
            shapes = ", ".join(str(list(shape)) for shape in fact["shapes"])
            return [
                self.finding(
                    scene,
                    first_step=0,
                    message=f"{count} {'parameter' if count == 1 else 'parameters'} of shape "
                    f"{shapes} existed only during one step: a layer is created anew in every "
                    "forward pass, with random weights that are never trained.",
                    evidence={"parameters": count},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return loss_missing(scene)
