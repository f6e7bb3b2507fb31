"""Parameters that are neither in a model nor in an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comgra_decl.rules.api import FactRule, Scene, loss_missing


class UnregisteredParameter(FactRule):
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
    kind = "outside"
    shown = ("count",)

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        number = int(fact["count"])
        return (
            f"{number} {'tensor' if number == 1 else 'tensors'} of shape {_shapes(fact)} receive "
            "gradients but are in no optimizer and in no model, so they are never updated."
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return loss_missing(scene)


class UselessBackward(FactRule):
    """Losses whose gradients reach no parameter of any optimizer."""

    name = "useless_backward"
    certainty = 0.8
    definition = (
        "`backward` is called on a loss in the first records, but no optimizer holds any of the "
        "parameters that receive its gradients, and none of them began as a copy of a parameter "
        "that one holds, as in meta-learning."
    )
    source = (
        "PyTorch's documentation of torch.optim: an optimizer updates the tensors it was given."
    )
    advice = (
        "Pass the parameters of the model that this loss trains to its optimizer, for example "
        "torch.optim.Adam(critic.parameters())."
    )
    kind = "trains nothing"
    shown = ("count",)

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            f"A loss sends gradients to {fact['count']} parameters (of shape {_shapes(fact)}), but "
            "no optimizer holds any of them, so this loss trains nothing."
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return loss_missing(scene)


class IdleTerm(FactRule):
    """Terms of a loss that train nothing."""

    name = "idle_term"
    certainty = 0.8
    definition = (
        "In at least two of the first four records, a term of a loss depends only on parameters of "
        "an optimizer that does not step after this loss, but does step after losses that depend "
        "on its parameters alone. No other term of the loss depends on that optimizer's "
        "parameters. The term's gradients are thus computed, but never used."
    )
    source = (
        "Haarnoja et al., Soft Actor-Critic (2018): the actor's loss evaluates the critic at the "
        "actor's own, reparameterized action. Our own definition."
    )
    advice = (
        "Compute the term from the output of the model that this loss trains. In an actor's loss, "
        "the critic must evaluate the actor's new actions, `critic(state, actor(state))`, not the "
        "stored ones, and the actor's output must not be detached."
    )
    kind = "idle term"
    shown = ("count",)

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            f"A term of a loss depends only on {fact['count']} parameters (of shape "
            f"{_shapes(fact)}) whose optimizer does not step after this loss. The term trains "
            "nothing."
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return loss_missing(scene)


class RecreatedParameter(FactRule):
    """Layers that are created anew in every step."""

    name = "recreated_parameter"
    certainty = 0.8
    definition = (
        "The loss of the first record depends on parameters (`nn.Parameter`) that no longer exist "
        "in the second record, and no optimizer has held them. They belong to a layer that is "
        "created when it is called. Parameters with the shape of an input are perturbations; those "
        "that began as copies of optimized ones belong to copied models. Both are ignored."
    )
    source = "PyTorch's documentation of nn.Module: submodules are assigned in `__init__`."
    advice = "Create the layer once, in `__init__`, and call it in `forward`."
    kind = "recreated"
    shown = ("count",)

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        number = int(fact["count"])
        return (
            f"{number} {'parameter' if number == 1 else 'parameters'} of shape {_shapes(fact)} "
            "existed only during one step: a layer is created anew in every forward pass, with "
            "random weights that are never trained."
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return loss_missing(scene)


def _shapes(fact: Mapping[str, Any]) -> str:
    """Return the shapes of some tensors of a fact as text."""
    listed = ", ".join(str(list(shape)) for shape in fact["shapes"])
    return listed + (", ..." if int(fact["count"]) > len(fact["shapes"]) else "")
