"""What experiments with the trained models show: mixed samples, and inputs without effect."""

from __future__ import annotations

from typing import Annotated, Any

from comgra_decl.rules.api import (
    PERTURBATIONS,
    RECTIFIERS,
    SEQUENCES,
    Field,
    Finding,
    Place,
    Positive,
    Rule,
    RuleParameters,
    Scene,
    sources_of,
)

_TRAINED = 20
"""Step of the copy from which an argument should have an effect. New layers may begin at zero."""

_LISTED = 6

_SLIGHT = 0.2  # standard deviations

_AFFINE = {"Linear", "Conv1d", "Conv2d", "Conv3d"}
_ACTIVATIONS = {*RECTIFIERS, "LeakyReLU", "PReLU", "ELU", "GELU", "SiLU", "Mish", "Softplus"}
_ACTIVATIONS |= {"Tanh", "Sigmoid", "Softmax"}
_STRAIGHT = 1e-4  # rounding of float32, amplified by a few layers


class ChangeParameters(RuleParameters):
    """Options of rules that change one part of the input."""

    change: Positive = 0.01
    """Smallest change to the outputs that is reported, relative to their standard deviation."""


class ExperimentRule(Rule):
    """A rule that reads the experiments with the trained models."""

    def perturbations(self, scene: Scene) -> list[dict[str, Any]]:
        """Return what was found about each model, if it could be called."""
        return [t for t in scene.documents.get(PERTURBATIONS) or [] if "refused" not in t]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        known = scene.documents.get(PERTURBATIONS) or []
        if not known:
            return (
                "it needs experiments with a copy of the model after the last step; set "
                "`perturbations: true` (models and batches up to 16 MiB)"
            )
        refused = [f"{t['model']}: {t['refused']}" for t in known if "refused" in t]
        return "; ".join(refused) if len(refused) == len(known) else None


class SamplesMixed(ExperimentRule):
    """Models whose output for a sample depends on the other samples."""

    name = "samples_mixed"
    severity = "error"
    certainty = 0.9
    definition = (
        "In evaluation mode, all samples of a batch but one are replaced. The outputs for the "
        "sample that stays change by more than `change` times the standard deviation of all "
        f"outputs. Changes below {_SLIGHT:g} times it, as by a scale that is common to the batch, "
        "are a hint. Not checked if no loss has a target with one row (or the same number of rows) "
        "per sample, if the model receives or returns something about pairs of samples, if samples "
        "depend only on those with the same value of an integer argument (their group), or if the "
        "second dimension turns out to be the batch."
    )
    source = (
        "Karpathy, A Recipe for Training Neural Networks: use the model to find out which inputs "
        "an output depends on."
    )
    advice = (
        "Look for a view, softmax, mean, normalization or attention over dimension 0. "
        "`comgra-decl batch-mixing` names the module in which the samples are mixed."
    )
    Parameters = ChangeParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first model that mixes samples."""
        for found in self.perturbations(scene):
            change, batch = float(found.get("mixes", 0.0)), int(found["batch"])
            rows = {call.target.shape[0] for call in scene.calls if call.target.shape}
            if change <= self.parameters.change or not any(n % batch == 0 for n in rows):
                continue
            return [
                self.finding(
                    scene,
                    place=Place(str(found["model"])),
                    first_step=0,
                    message=f"The outputs of {found['model']} for one sample change by "
                    f"{change:.2g} standard deviations when the other samples in the batch are "
                    f"replaced, although the model is in evaluation mode.{_suspects(scene)}",
                    evidence={"change": change, "batch": batch},
                    **({"severity": "hint"} if change < _SLIGHT else {}),
                )
            ]
        return []


def _suspects(scene: Scene) -> str:
    """Return a sentence about modules and calls that may mix the samples; empty if unknown."""
    infos = scene.table.infos
    batches = {i.shape[0] for i in infos if i.kind == "input" and i.batch_dim == 0 and i.shape}
    for module in scene.documents.get("modules") or []:
        if module.get("class") not in SEQUENCES:
            continue
        if (module.get("settings") or {}).get("batch_first") is not False:
            continue
        shapes = [i.shape for i in infos if i.key.node == module["node"] and len(i.shape) == 3]
        if any(shape[0] in batches and shape[0] != shape[1] for shape in shapes):
            return (
                f" {module['node']} ({module['class']}) lacks batch_first=True, but receives the "
                "batch in the first dimension, so it treats the samples as time steps."
            )
    for fact in scene.told("weighs"):
        if int(fact["dim"]) == 0 and fact["shape"][0] in batches:
            return f" The softmax before {fact['where']} runs over the samples (dimension 0)."
    return ""


class IgnoredInput(ExperimentRule):
    """Arguments that have no effect on the outputs."""

    name = "ignored_input"
    certainty = 0.75
    definition = (
        "An argument of a trained model differs between the samples in a batch, but when it is "
        "exchanged between samples, no output changes. The same is checked for each column of a "
        "table with 3 to 64 columns. A copy of the model from step "
        f"{_TRAINED} or later is used, because new layers may begin without effect. Only a hint if "
        "it concerns columns, because a model may look at a part of a window on purpose. Arguments "
        "from which a loss is computed directly are left out: in some programs, the model receives "
        "the whole batch with its labels."
    )
    source = "Interventions on inputs, as in permutation importance (Breiman, 2001)."
    advice = (
        "Check where the argument is used: a result that is computed and not returned, a mask or "
        "condition that is not passed on, a slice that drops columns, a layer that stays at zero."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first model with such arguments."""
        for found in self.perturbations(scene):
            names = [str(name) for name in found.get("ignored") or ()]
            names = [name for name in names if name.partition("[:, ")[0] not in _in_losses(scene)]
            if not names or int(found["step"]) < _TRAINED:
                continue
            shown = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
            # a receptive field may be narrower than its window
            columns = all(name.endswith("]") and "[:, " in name for name in names)
            return [
                self.finding(
                    scene,
                    severity="hint" if columns else self.severity,
                    place=Place(str(found["model"])),
                    first_step=0,
                    message=f"Exchanging {shown} of {found['model']} between samples changes no "
                    "output, so the model does not use it.",
                    evidence={"ignored": len(names), "step": int(found["step"])},
                )
            ]
        return []


def _in_losses(scene: Scene) -> set[str]:
    """Return the arguments of models, such as "[0].y", from which losses are computed directly."""
    infos = scene.table.infos
    return {
        infos[source].key.role.removeprefix("input")
        for sink, sources in sources_of(scene).items()
        if infos[sink].kind == "loss"
        for source in sources
        if infos[source].kind == "input"
    }


class OrderIgnored(ExperimentRule):
    """Attention over tokens without positions."""

    name = "order_ignored"
    certainty = 0.7
    definition = (
        "The input of a model is tokens [batch, positions], and the model contains attention. When "
        "the tokens are permuted, the outputs are permuted in the same way or stay the same, up to "
        "rounding errors (1e-4 standard deviations)."
    )
    source = (
        "Vaswani et al., Attention Is All You Need (2017), section 3.5: without positions, the "
        "model cannot use the order of the sequence."
    )
    advice = (
        "Add positional embeddings to the token embeddings, and check that they reach the first "
        "block: not overwritten, not multiplied by zero, and with a different row per position. "
        "Turn the rule off if the tokens are a set."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first model that ignores the order."""
        for found in self.perturbations(scene):
            change = found.get("order")
            if change is None or float(change) > 1e-4 or not scene.attentions:
                continue
            return [
                self.finding(
                    scene,
                    place=Place(str(found["model"])),
                    first_step=0,
                    message=f"Permuting the tokens changes nothing about the outputs of "
                    f"{found['model']} but their order: its attention knows no positions.",
                    evidence={"change": float(change), "step": int(found["step"])},
                )
            ]
        return []


class PaddingParameters(RuleParameters):
    """Options of `padding_matters`."""

    change: Annotated[Positive, Field(ge=0.01)] = 0.5
    """Smallest change to the outputs that is reported, relative to their standard deviation."""


class PaddingMatters(ExperimentRule):
    """Outputs that depend on the amount of padding."""

    name = "padding_matters"
    certainty = 0.7
    definition = (
        "The input of a model is tokens [batch, positions], some of which are padding at the end. "
        "When four more positions of padding are appended, also to masks of the same shape, the "
        "outputs for the padded samples (at their tokens, if there is one output per position) "
        "change by more than `change` times the standard deviation of all outputs."
    )
    source = "Invariance to padding, a metamorphic test. Our own definition."
    advice = (
        "Pass a padding mask to attention and pooling, divide sums by the lengths, and read "
        "recurrent states at the last token (or use `pack_padded_sequence`)."
    )
    Parameters = PaddingParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such model."""
        for found in self.perturbations(scene):
            change = float(found.get("padding", 0.0))
            if change <= self.parameters.change:
                continue
            return [
                self.finding(
                    scene,
                    place=Place(str(found["model"])),
                    first_step=0,
                    message=f"Appending padding changes the outputs of {found['model']} for padded "
                    f"samples by {change:.2g} standard deviations.",
                    evidence={"change": change, "step": int(found["step"])},
                )
            ]
        return []


class NoNonlinearity(ExperimentRule):
    """Models of several layers that are an affine function of their input."""

    name = "no_nonlinearity"
    certainty = 0.8
    definition = (
        "The model has at least two linear or convolutional layers, one of which receives what the "
        "other computes, and no activation module was called. Along the lines between the "
        "samples, and beyond them, the outputs of a trained model change like an affine function "
        "of its floating-point inputs: they deviate by at most 0.0001 times the standard deviation "
        f"of the outputs. A copy of the model from step {_TRAINED} or later is used."
    )
    source = "The composition of affine functions is affine. Our own definition."
    advice = (
        "Put an activation function between the layers, and check that its result is used. Turn "
        "the rule off if the model is linear on purpose, such as a low-rank factorization."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such model."""
        layers = _in_sequence(scene)
        for found in self.perturbations(scene):
            line = found.get("affine")
            if not layers or not line or int(found["step"]) < _TRAINED:
                continue
            if _is_one_layer(scene, str(found["model"])):
                continue
            if line["bend"] <= _STRAIGHT and line["reacts"] > 100 * _STRAIGHT:
                return [
                    self.finding(
                        scene,
                        place=Place(str(found["model"])),
                        first_step=0,
                        message=f"Nothing nonlinear has an effect between {layers[0]} and "
                        f"{layers[1]}: the outputs of {found['model']} are an affine function of "
                        f"its inputs (deviation {line['bend']:.1g} standard deviations), as those "
                        "of a single layer would be.",
                        evidence={"bend": line["bend"], "layers": " -> ".join(layers)},
                    )
                ]
        return []


def _is_one_layer(scene: Scene, model: str) -> bool:
    """Return whether a model that is called by itself is a single layer."""
    classes = {info.module_class for info in scene.table.infos if info.key.node == model}
    return not classes.isdisjoint(_AFFINE)


def _in_sequence(scene: Scene) -> tuple[str, str] | None:
    """Return two linear layers, the second of which depends on the first.

    Layers in parallel do not need anything between them. None if an activation module was called,
    which may happen to be linear for the data of this run.
    """
    infos = scene.table.infos
    forward = [i for i in infos if i.kind == "computed" and i.key.pass_ == "forward"]
    if any(i.module_class in _ACTIVATIONS for i in forward):
        return None
    sources = sources_of(scene)
    for info in forward:
        if info.module_class not in _AFFINE:
            continue
        waiting, seen = [info.id], {info.id}
        while waiting:
            for slot in sources.get(waiting.pop(), ()):
                source = infos[slot]
                if slot in seen:
                    continue
                another = source.kind == "computed" and source.key.node != info.key.node
                if another and source.module_class in _AFFINE:
                    return source.key.node, info.key.node
                seen.add(slot)
                waiting.append(slot)
    return None


class DropoutInEvaluation(ExperimentRule):
    """Dropout that stays active in evaluation mode."""

    name = "dropout_in_evaluation"
    certainty = 0.85
    definition = (
        "In evaluation mode, a trained model calls a dropout function with `training=True` (the "
        "default of `torch.nn.functional.dropout`) and a rate between 0 and 1."
    )
    source = "PyTorch's documentation of torch.nn.functional.dropout. Our own definition."
    advice = "Use nn.Dropout, or pass F.dropout(x, p, training=self.training)."

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such model."""
        for found in self.perturbations(scene):
            functions = [str(name) for name in found.get("noise") or ()]
            if functions:
                return [
                    self.finding(
                        scene,
                        place=Place(str(found["model"])),
                        first_step=0,
                        message=f"{found['model']} calls `{functions[0]}` with training=True also "
                        "in evaluation mode, so its predictions are random and worse than they "
                        "could be.",
                        evidence={"functions": ", ".join(functions)},
                    )
                ]
        return []
