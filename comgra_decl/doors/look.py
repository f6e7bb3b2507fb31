"""Record one call of a model without training it: `comgra.look(model, *inputs)`."""

from __future__ import annotations

import copy
import inspect
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from comgra_decl.annotations import note
from comgra_decl.doors import environment
from comgra_decl.errors import CallError, ProbeError, SpecError, did_you_mean, shown
from comgra_decl.hooks.probing.changed_calls import ChangedCalls
from comgra_decl.hooks.probing.copying import CleanCopy, unwrapped
from comgra_decl.hooks.probing.dictionaries import attach
from comgra_decl.hooks.probing.loading import EXTRA_STATE, load
from comgra_decl.hooks.probing.method_calls import MethodCalls, ModelCall
from comgra_decl.hooks.probing.method_effects import Called, MethodEffect, effects_on, problems_of
from comgra_decl.hooks.probing.seclusion import Autocast, undisturbed
from comgra_decl.hooks.pytree import first_batch_size, tensors_in
from comgra_decl.hooks.tensors.loss_calls import nodes_behind
from comgra_decl.query import Run
from comgra_decl.query.checkpoints import Checkpoint, all_tensors, as_tensor
from comgra_decl.record.context import RunContext
from comgra_decl.record.recalling import Recalling
from comgra_decl.record.session import Session
from comgra_decl.records import INTERVENTION_PREFIX
from comgra_decl.spec.dictionaries import DictionaryPlace
from comgra_decl.spec.interventions import (
    ChangeSpec,
    InterventionSpec,
    changes_from,
    needs_labels,
)
from comgra_decl.spec.probes import ProbeName, probe_type

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from comgra_decl.hooks import HookManager
    from comgra_decl.record.ranks import Rank
    from comgra_decl.spec import Spec
    from comgra_decl.store.location import Location, Where

Loss = Callable[..., torch.Tensor]

_OF_UPDATES = ("update", "optimizer_state")
"""What a spec may capture of an optimizer step, which a single call does not have."""

OF_TENSORS = (
    *("nodes", "exclude", "stats", "histogram", "samples"),
    *("annotations", "tokens", "graph"),
)
"""The keys of a spec that apply to a single call."""

_MOST_SAMPLES = 65536

_SAMPLES = "look"
"""The probe whose samples are those of the call."""


class Look(Run):
    """The record of one call (`comgra.look`), or of repeated steps (`comgra.replay`): a `Run`.

    It is stored in a temporary folder, which is removed together with this object, or when Python
    exits. `save` keeps it.

    Attributes:
        step: the step of the first record: that of the checkpoint whose weights were used, or else
            0.
        output: what the method returned, with tensors on their devices; None if the model itself
            was called.
        changes: a sentence about what each change has changed.
        model_calls: the calls of the model that the method has made; see `calls`.
        kept: the number of positions in the caches at the end, by module, where that is known.
    """

    step = 0
    output: Any = None
    changes: Sequence[str] = ()
    model_calls: Sequence[ModelCall] = ()
    kept: Mapping[str, int] = MappingProxyType({})

    @property
    def calls(self) -> pd.DataFrame:
        """The calls of the model that a method has made, one per step; empty without a method.

            >>> comgra.look(model, tokens, call="generate", max_new_tokens=3).calls
                 module  first  last
            step
            0                0     6
            1                7     7
            2                8     8

        `module` is the path of what was called, "" for the model, and `first` and `last` are the
        positions that the call computed, in the sequence and with its padding; NA if it received no
        sequence.
        """
        import pandas as pd

        ends = [
            (None, None) if c.positions is None else _ends(c.positions) for c in self.model_calls
        ]
        steps = pd.RangeIndex(self.step, self.step + len(ends), name="step")
        found = pd.DataFrame(ends, index=steps, columns=["first", "last"]).astype("Int64")
        found.insert(0, "module", [call.module for call in self.model_calls])
        return found

    def sequence(self, node: str, role: str = "output", *, of: str = "forward") -> NDArray[Any]:
        """Return a tensor of all calls that a method has made, joined along the positions.

        Where several calls compute the same position, as without a cache, the last one counts. A
        call that begins at a position replaces all that earlier calls have computed from there on,
        and what the method has cut off its cache in the end is omitted: such positions belong to
        tokens that were proposed and rejected (speculative decoding).

        Args:
            node: the node.
            role: the tensor, which must contain [samples, positions, ...] in each call.
            of: the pass.

        Returns:
            [samples, positions, ...], with the positions of the whole sequence; those that no call
            has computed are omitted.

        Raises:
            CallError: the tensor does not have a row for each position.
            UnknownNameError: it was not recorded.
        """
        slot = self.slot(node, role=role, of=of)
        (kind,) = (name for name in self.types if not name.startswith(INTERVENTION_PREFIX))
        parts: dict[int, NDArray[Any]] = {}
        most = None
        for step in slot.shapes(type=kind).index:
            call = self.model_calls[int(step) - self.step] if self.model_calls else None
            positions = None if call is None else call.positions
            value = slot.value(int(step), type=kind)
            if positions is None or value.ndim < 2 or value.shape[1] != len(positions):
                raise CallError(
                    f"{node}, {role} has the shape {list(value.shape)} at step {step}, but a "
                    "sequence needs [samples, positions, ...]; read it with "
                    f"slot({node!r}).value({step}, type={kind!r})"
                )
            parts = {at: part for at, part in parts.items() if at < positions.start}
            parts |= {at: value[:, place] for place, at in enumerate(positions)}
            most = self.kept.get(call.module) if call is not None else None
        if most is not None:
            parts = {at: part for at, part in parts.items() if at < most}
        if len({part.shape for part in parts.values()}) > 1:
            raise CallError(f"{node}, {role} does not have the same samples in all calls")
        return np.stack([parts[position] for position in sorted(parts)], axis=1)

    def save(self, path: Where) -> Location:
        """Write the record to `path` as an ordinary run, which `open_run` reads.

        Args:
            path: the folder of the new run, or its location in a bucket. If the folder exists and
                is not a run, the run becomes a folder inside it.

        Returns:
            Where the run is.

        Raises:
            StoreError: the folder is a run, which is never overwritten, or cannot be written.
        """
        from comgra_decl.store.copying import copy_run

        return copy_run(self.path, path)


def look(
    model: nn.Module,
    *inputs: Any,
    spec: str | Path | Mapping[str, Any] | Spec = "debug",
    weights: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    pictures: Mapping[str, Any] | None = None,
    interventions: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
    dictionaries: Mapping[str, Mapping[str, Any]] | None = None,
    call: str = "forward",
    **kwargs: Any,
) -> Look:
    """Record one call of a model, without training it and without a run folder.

        cache = comgra.look(model, images, loss=lambda output: F.cross_entropy(output, labels))
        cache.slot("layer1").value(0), cache.slot("layer1").grad.value(0), cache.edges()

        text = comgra.look(model, tokens, call="generate", max_new_tokens=8)
        text.output, text.calls, text.sequence("transformer.h.1")

    The call is made on a copy of the model with copies of the inputs, in the mode that each module
    has. The model, its gradients and hooks, the inputs and the random number generators do not
    change, even if the call fails. The values of all samples in the batch are kept, regardless of
    their size, for the tensors that the spec selects.

    Args:
        model: the model. Wrappers such as DistributedDataParallel and `torch.compile` are removed.
        *inputs: its positional arguments.
        spec: name of a preset, path of a YAML file, a mapping with the same keys, or a Spec. Only
            what it says about tensors and pictures applies: nodes, statistics, histograms, the
            graph, and pictures, for which the samples of the call take the place of the probe's.
            Its interventions are ignored; `interventions` names those of this call.
        weights: parameters and buffers by name, as in the state dict of the model or its wrapper,
            or from `run.checkpoint(step)`; None to use those of the model.
        loss: receives the model's output and returns the scalar whose gradients are recorded; None
            to record no gradients. If it has a parameter called `model`, it also receives the copy,
            for terms such as a penalty on parameters. It is called as it is, so a loss that is a
            module with buffers may change them.
        pictures: pictures of the samples, as in a spec but without `of`: `{"cam": {"method":
            "grad_cam", "select": "conv2"}}` for `cache.picture("cam")`. They need further passes
            through a copy, and with them, the call itself is made with gradients enabled.
        interventions: interventions on the samples, as in a spec but without `of`, also with
            `sweep`, `into` or `estimate`: `{"heads": {"select": "blocks.*.attn.out", "role":
            "input", "do": "mean", "sweep": ["node", "head"]}}` for `cache.effects("heads")`. They
            need further passes, as pictures do, and leave the record of the call as it is. Of a
            method, each place of a sweep is a call of the method, and `measure` is a function of
            what it returns.
        changes: what is changed in the model while it is called: one or several mappings with the
            keys of an intervention: `select`, `exclude`, `role`, `iteration`, `parts` and `do`.
        dictionaries: sparse autoencoders and transcoders by name, as in a spec but with the object
            as `module` instead of `of` and `load`: `{"sae": {"select": "blocks.3", "module": sae}}`
            for `cache.slot("blocks.3.sae")`. `changes` may select them.
        call: the method to call instead of the model, such as "generate", which calls the model
            several times. Each of these calls is a record. In `changes`, positions are then counted
            from the start of the sequence.
        **kwargs: keyword arguments of the model, or of the method.

    Returns:
        A `Run` with one record, or one for each call that a method makes. Its type is "train" with
        a loss, and "eval" without one.

    Raises:
        CallError: the model cannot be copied, the weights do not fit, the loss is not a scalar with
            gradients or uses parameters of the model itself, nothing was recorded, a change or an
            intervention is not possible, or a session is recording in this process.
        SpecError: the spec is invalid, or a change selects nothing.
    """
    _check(model, loss)
    specs = _changes(changes)
    described = _dictionaries(dictionaries)
    content = _declared(spec, pictures, interventions)
    further = [*content["pictures"], *content["interventions"]]
    _check_method(model, call, loss=loss, pictures=[*content["pictures"]])
    of_method = {} if call == "forward" else _of_method(content)
    if specs and further:
        raise CallError(
            "pictures and interventions are made of the unchanged model, so `changes` cannot be "
            "combined with `interventions` or pictures (of the spec or `pictures`); make two calls"
        )
    step = weights.step if isinstance(weights, Checkpoint) else 0
    single = call == "forward"
    gradient = torch.is_grad_enabled() or loss is not None or (bool(further) and single)
    folder = Path(tempfile.mkdtemp(prefix="comgra-look-"))
    try:
        with ExitStack() as stack:
            stack.enter_context(undisturbed())
            own = _copied(model)
            stack.callback(own.close)
            if own.device.type == "meta":
                raise CallError(
                    f"{type(own.module).__name__} is on the meta device, where tensors have no "
                    "values to record. Move it with model.to_empty(device=...) and load its weights"
                )
            if weights is not None:
                load(own.module, _tensors(weights))
            for name, (place, module) in described.items():
                path = attach(own, name, place, module, where=f"dictionaries[{name!r}]")
                node = {"select": [{"path": path}], "values": True}
                content["nodes"][f"dictionary {name}"] = node
            args, named = _inputs(inputs, kwargs, own)
            stack.enter_context(torch.set_grad_enabled(gradient))
            stack.enter_context(Autocast.now(own.device.type).again())
            batch = first_batch_size(args, named) or 1
            rows = batch
            if not single:
                batch *= _copies(model, named)
            placed = _placed(content, folder, step, batch=batch, single=single)
            changed = None
            if specs:
                changed = ChangedCalls(own, specs, recall=partial(Recalling(), "eval"))
            called = _Called(own, args, named, method=call, changed=changed)
            with own.apart():
                if changed is not None and changed.needs_unchanged:
                    args, named = _inputs(inputs, kwargs, own)
                    with torch.no_grad(), changed.remembered():
                        replace(called, args=args, kwargs=named).call()
                effects = [
                    _effects(name, each, called, inputs, kwargs, samples=rows)
                    for name, each in of_method.items()
                ]
                run = _recorded(placed, called, loss, model, effects)
        found = Look(run)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, ProbeError):
            raise CallError(str(error)) from error
        raise
    found.step = step
    found.output, found.model_calls, found.kept = called.output, called.calls, called.kept
    found.changes = [] if changed is None else changed.said()
    remove_with(found, folder)
    return found


def _of_method(content: dict[str, Any]) -> dict[str, InterventionSpec]:
    """Take the interventions from a spec, and return those on the calls of a method.

    Raises:
        CallError: they are not possible for a method.
        SpecError: they are invalid, or name a function that cannot be imported.
    """
    from comgra_decl.doors.checked_spec import require_functions
    from comgra_decl.spec import load_spec

    declared, content["interventions"] = content["interventions"], {}
    if not declared:
        return {}
    spec = load_spec({"probes": {_SAMPLES: {}}, "interventions": declared})
    require_functions(spec)
    specs = spec.interventions
    problems = [p for name, each in specs.items() for p in problems_of(name, each)]
    if problems:
        raise CallError("; ".join(problems))
    return dict(specs)


def _effects(
    name: str,
    spec: InterventionSpec,
    called: _Called,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    samples: int,
) -> MethodEffect:
    """Return the effects of an intervention on what a method returns."""
    where = f"interventions[{name!r}]"
    names = [*(f"{where}.first[{i}]" for i in range(len(spec.first))), where]
    changes = ChangedCalls(
        called.own, [*spec.first, spec], recall=partial(Recalling(), "eval"), names=names
    )

    def call(made: ChangedCalls) -> Called:
        args, named = _inputs(inputs, kwargs, called.own)
        again = replace(called, args=args, kwargs=named, changed=made, calls=[])
        output = again.call(again.calls.append)
        ends = [each.positions.stop for each in again.calls if each.positions is not None]
        return Called(output, max(ends, default=None))

    return effects_on(name, spec, changes, call, samples=samples)


def remove_with(found: Look, folder: Path) -> None:
    """Remove a temporary folder together with the record that it contains."""
    weakref.finalize(found, _remove, folder, os.getpid())


def _check(model: object, loss: object) -> None:
    if not isinstance(model, nn.Module):
        raise CallError(f"model must be a torch.nn.Module, got {shown(model)}")
    if loss is not None and not callable(loss):
        raise CallError(
            f"loss must be a function of the model's output, got {shown(loss)}; for example "
            "loss=lambda output: output.sum()"
        )
    if environment.is_recording():
        raise CallError(
            "comgra.look cannot be used while this process records a run. Use it before or after, "
            "or declare a probe, which passes samples through a copy of the model during training"
        )


def _check_method(model: nn.Module, name: object, *, loss: object, pictures: Sequence[str]) -> None:
    inner = unwrapped(model)
    kind = type(inner)
    method: Any = None
    there = isinstance(name, str) and inspect.getattr_static(kind, name, None) is not None
    if isinstance(name, str) and not isinstance(inspect.getattr_static(kind, name, None), property):
        method = getattr(inner, name, None)
    if not callable(method):
        known = [n for n in dir(kind) if not n.startswith("_") and callable(getattr(kind, n))]
        what = f"{shown(name)}, which is no method" if there else shown(name)
        near = did_you_mean(name, known) if isinstance(name, str) and not there else ""
        raise CallError(
            f"call must name a method of {kind.__name__}, such as 'generate', got {what}{near}"
        )
    if name == "forward":
        return
    later: tuple[tuple[Callable[[object], bool], str], ...] = (
        (inspect.isgeneratorfunction, "yields its results"),
        (inspect.isasyncgenfunction, "yields its results"),
        (inspect.iscoroutinefunction, "is a coroutine"),
    )
    for test, what in later:
        if test(inspect.unwrap(method)):
            raise CallError(
                f"call={name!r} {what}, so that its calls of the model would be made after this "
                "one; name a method that returns its result"
            )
    if loss is not None:
        raise CallError(
            f"a loss belongs to one call of the model, but {name!r} makes several. Look at its "
            "output in a second call, as in comgra.look(model, found.output, loss=...)"
        )
    if pictures:
        raise CallError(
            f"pictures ({', '.join(pictures)}) belong to one call of the model, "
            f"but {name!r} makes several. Make them of its output in a second call, as in "
            "comgra.look(model, found.output, pictures=...)"
        )


def _changes(given: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[ChangeSpec]:
    specs = changes_from(given)
    for number, each in enumerate(specs):
        if needs_labels(each.do):
            raise CallError(
                f"changes[{number}].do: difference needs labels, which a single call does not "
                "have; take it from a run, as in {run: PATH, difference: [A, B]}, or from a file"
            )
    return specs


def _dictionaries(given: object) -> dict[str, tuple[DictionaryPlace, Any]]:
    """Return the dictionaries of a call with their places."""
    entries = {} if given is None else given
    if not isinstance(entries, Mapping):
        raise CallError(f"dictionaries must map names to dictionaries, got {shown(given)}")
    found = {}
    for name, entry in entries.items():
        where = f"dictionaries[{name!r}]"
        if not (isinstance(entry, Mapping) and "module" in entry):
            raise CallError(
                f"{where} must be a mapping with the key 'module', as in "
                f'{{"select": "blocks.3", "module": sae}}, got {shown(entry)}'
            )
        try:
            checked = TypeAdapter(ProbeName).validate_python(name)
            place = DictionaryPlace.model_validate(
                {k: v for k, v in entry.items() if k != "module"}
            )
        except ValidationError as error:
            problems = (".".join(map(str, e["loc"])) + f": {e['msg']}" for e in error.errors())
            raise CallError(f"{where}: {'; '.join(problems)}") from None
        found[checked] = (place, entry["module"])
    return found


def _ends(positions: range) -> tuple[int, int]:
    return positions[0], positions[-1]


def _declared(
    source: str | Path | Mapping[str, Any] | Spec,
    pictures: Mapping[str, Any] | None,
    interventions: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the content of the spec of a single call."""
    from comgra_decl.doors.checked_spec import declared

    spec = declared(source)
    if not spec.enabled:
        raise SpecError(["comgra.enabled: comgra.look has nothing to record with `enabled: false`"])
    content = spec.model_dump(mode="json", by_alias=True)
    for name, entry in [*content["nodes"].items()]:
        entry["values"] = True
        entry["capture"] = [what for what in entry["capture"] if what not in _OF_UPDATES]
        if not entry["capture"]:
            del content["nodes"][name]
    of_samples = {
        "pictures": {**content["pictures"], **_checked(pictures, "picture")},
        "interventions": _checked(interventions, "intervention"),
    }
    return {
        **{key: content[key] for key in OF_TENSORS},
        **{
            key: {name: {**each, "of": _SAMPLES} for name, each in entries.items()}
            for key, entries in of_samples.items()
        },
        "values": {"max_elements": 1 << 62},
        "preview": False,
        "rules": "off",
        "kpis": {"loss": True, "automatic": False},
        "run": {"group": "look", "name": "look"},
        "store": {"commit_interval": 0},
    }


def _checked(given: object, kind: str) -> dict[str, Any]:
    """Return the pictures or interventions of a call, after checking their form."""
    entries = {} if given is None else given
    if not isinstance(entries, Mapping):
        raise CallError(f"{kind}s must map names to {kind}s, got {shown(given)}")
    for name, entry in entries.items():
        if not isinstance(entry, Mapping):
            raise CallError(f"{kind}s[{name!r}] must be a mapping, got {shown(entry)}")
        if "of" in entry:
            raise CallError(
                f"{kind}s[{name!r}].of: there are no probes, because the samples are those of the "
                "call; leave it out"
            )
    return dict(entries)


def _placed(content: dict[str, Any], folder: Path, step: int, *, batch: int, single: bool) -> Spec:
    """Return the spec of a call with the given number of samples, stored in a folder.

    Args:
        content: what the user's spec says.
        folder: where the run is stored.
        step: the step of the first record.
        batch: the number of samples.
        single: whether the model is called once rather than by a method.
    """
    from comgra_decl.doors.checked_spec import require_functions
    from comgra_decl.spec import load_spec

    samples = {**content["samples"], "count": min(batch, _MOST_SAMPLES)}
    if content["pictures"] or content["interventions"]:
        # `by` would choose among the samples and reorder them.
        own = {"samples": {"count": samples["count"]}, "mode": "as_is"}
        content = {**content, "probes": {_SAMPLES: own}}
    schedule: dict[str, Any] = {"steps": [step], "step": "explicit", "max_iterations": None}
    if not single:  # a commit for each of many records would take longer than the calls
        content = {**content, "store": {"commit_interval": 5}}
        schedule |= {"steps": None, "first": step + 1, "every": 1}
    run = {**content["run"], "root": str(folder)}
    spec = load_spec({**content, "run": run, "schedule": schedule, "samples": samples})
    require_functions(spec)
    return spec


def _copies(model: nn.Module, given: Mapping[str, Any]) -> int:
    """Return how often `generate` of transformers repeats each sample at most, as for beams."""
    asked: list[Any] = [given.get("generation_config"), getattr(model, "generation_config", None)]
    times = 1
    for name in ("num_beams", "num_return_sequences"):
        values = [given.get(name), *(getattr(config, name, None) for config in asked)]
        times *= max(1, next((v for v in values if isinstance(v, int)), 1))
    return times


def _copied(model: nn.Module) -> CleanCopy:
    try:
        return CleanCopy(model, {}, traceable=True)
    except ProbeError as error:
        name = type(unwrapped(model)).__name__
        raise CallError(f"comgra.look records a copy of {name}, but {error}") from error


def _tensors(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    if not isinstance(weights, Mapping):
        raise CallError(
            f"weights must map names to tensors or arrays, as a state dict does, got "
            f"{shown(weights)}"
        )
    if isinstance(weights, Checkpoint):
        return all_tensors(weights)
    tensors = {n: as_tensor(v) if isinstance(v, np.ndarray) else v for n, v in weights.items()}
    for name, tensor in tensors.items():
        if not (isinstance(tensor, torch.Tensor) or name.endswith(EXTRA_STATE)):
            raise CallError(f"weights[{name!r}] must be a tensor or array, got {shown(tensor)}")
    return tensors


def _inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], model: CleanCopy
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of the arguments; tensors that require gradients are leaves."""
    memo: dict[int, Any] = {}
    for _, tensor in (*tensors_in(args), *tensors_in(kwargs)):
        moved = tensor.detach().to(model.device if model.moved else tensor.device, copy=True)
        memo[id(tensor)] = moved.requires_grad_() if tensor.requires_grad else moved
    try:
        copied: tuple[tuple[Any, ...], dict[str, Any]] = copy.deepcopy((args, kwargs), memo)
    except Exception as error:
        raise CallError(
            f"an argument of the model cannot be copied ({type(error).__name__}: {error})"
        ) from error
    return copied


@dataclass
class _Called:
    """A copy of the model, and how it is called.

    Attributes:
        own: the copy.
        args: the arguments.
        kwargs: the keyword arguments.
        method: the method to call.
        changed: makes the changes; None without any.
        calls: the calls of the model that the method has made.
        output: what the method has returned, or None for "forward".
        kept: the number of positions in the caches at the end, by module; see `MethodCalls.kept`.
    """

    own: CleanCopy
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    method: str
    changed: ChangedCalls | None
    calls: list[ModelCall] = field(default_factory=list)
    output: Any = None
    kept: Mapping[str, int] = field(default_factory=dict)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The tensors whose gradients a loss may have."""
        inputs = (tensor for _, tensor in tensors_in((self.args, self.kwargs)))
        return [t for t in (*self.own.module.parameters(), *inputs) if t.requires_grad]

    def call(
        self,
        begun: Callable[[ModelCall], None] | None = None,
        end: Callable[[], None] | None = None,
    ) -> Any:
        """Return the output of the method.

        Args:
            begun: called with each call of the model that a method makes, as it begins.
            end: called after each of them.
        """
        module, changed = self.own.module, self.changed
        if self.method == "forward":
            if changed is not None:
                changed.begin(first_batch_size(self.args, self.kwargs) or 1, None)
            return module(*self.args, **self.kwargs)

        def begin(call: ModelCall) -> None:
            start = None if call.positions is None else call.positions.start
            if changed is not None:
                changed.begin(call.rows, start)
            if begun is not None:
                begun(call)

        calls = MethodCalls(self.own, begin=begin, end=end or (lambda: None))
        with calls.followed():
            output = getattr(module, self.method)(*self.args, **self.kwargs)
        self.kept = calls.kept
        return output


def _recorded(
    spec: Spec,
    called: _Called,
    loss: Loss | None,
    model: nn.Module,
    effects: Sequence[MethodEffect],
) -> Path:
    """Call the copy of `model`, record the call and the effects, and return the run's folder."""
    module = called.own.module
    single = called.method == "forward"
    session = _CallSession(spec, context=RunContext(), model=module, single=single)

    def begun(call: ModelCall) -> None:
        called.calls.append(call)
        note(_named(call))

    try:
        session.start()
        environment.recorded(session, True)
        with nullcontext() if called.changed is None else called.changed.made():
            output = called.call(begun, session.end_call)
            if loss is not None:
                more = {"model": module} if _takes_model(loss) else {}
                value = loss(output, **more)
                _check_loss(value, called.leaves)
                _check_graph(value, model)
                _backward(value.reshape(()), called.leaves)
                session.end_call()
        if not single and not called.calls:
            session.never_called(called.method)
        if not single:
            called.output = output
        for each in effects:
            session.add_effects(each)
    finally:  # also ends the writer's thread if the session failed to start
        environment.recorded(session, False)
        session.finish()
    return session.result()


def _named(call: ModelCall) -> str:
    """Return the name of the step of a call."""
    whole = f"{call.module}: " if call.module else ""
    if not call.positions:
        return f"{whole}no positions"
    first, last = _ends(call.positions)
    return f"{whole}position {first}" if first == last else f"{whole}positions {first} to {last}"


def _takes_model(loss: Loss) -> bool:
    try:
        return "model" in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # a built-in function
        return False


def _check_loss(value: object, leaves: list[torch.Tensor]) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        what = shown(value) if shape is None else f"the shape {shape}"
        raise CallError(f"loss must return a tensor with one element, got {what}")
    if not value.requires_grad or not leaves:
        raise CallError(
            "the loss has no gradients: neither a parameter of the model nor an input requires "
            "them, or the model or the loss detaches its result. Omit `loss` to record only values"
        )


def _backward(loss: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """Compute the gradients of leaves; other tensors that the loss uses keep their `.grad`."""
    nodes = [*nodes_behind(loss, most=math.inf)]
    if not any(type(node).__name__.startswith("CheckpointFunction") for node in nodes):
        torch.autograd.backward(loss, inputs=leaves)
        return
    # Reentrant checkpoints accept no `inputs`, so other tensors are put back afterwards.
    own = {id(leaf) for leaf in leaves}
    others = [node.variable for node in nodes if hasattr(node, "variable")]
    before = [(t, t.grad) for t in others if id(t) not in own]
    for tensor, _ in before:
        tensor.grad = None
    try:
        loss.backward()
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient


def _check_graph(loss: torch.Tensor, model: nn.Module) -> None:
    """Refuse a loss with terms whose gradients would be missing from those of the copy."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for node in nodes_behind(loss, most=math.inf):
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise CallError(
                f"the loss uses {name!r} of the model itself, but the gradients are those of a "
                "copy. Give the loss a parameter called `model`, which receives the copy, as in "
                "loss=lambda output, model: output.sum() + model.weight.square().sum()"
            )


class _CallSession(Session):
    """The session of a single call, whose errors are raised instead of logged."""

    _in_batch_order = True  # all samples are recorded

    def __init__(self, spec: Spec, *, context: RunContext, model: nn.Module, single: bool) -> None:
        super().__init__(spec, context=context)
        self._model = model
        self._single = single
        self._uncalled: str | None = None

    def never_called(self, method: str) -> None:
        """Say that a method has called no module."""
        self._uncalled = method

    def _rank(self) -> Rank | None:
        """Return None: each process of a distributed job looks on its own."""
        return None

    def _manager(self, **arguments: Any) -> HookManager:
        manager = super()._manager(**arguments)
        schedule = self._spec.schedule
        manager.begin_at(schedule.steps[0] if schedule.steps else schedule.first - 1)
        manager.expect(self._model)
        manager.probe_single_call()
        if not self._single:
            manager.only_evaluate()
        return manager

    def end_call(self) -> None:
        """Read the gradients of the parameters, and close the record."""
        if self._hooks is not None:
            self._hooks.end_call()

    def add_effects(self, effects: MethodEffect) -> None:
        """Store the effects of an intervention on what a method returns."""
        if self._hooks is not None:
            node, step = type(unwrapped(self._model)).__name__, self._spec.schedule.first - 1
            self._hooks.emit(
                lambda table: effects.record(node, step, table), warning=effects.nothing
            )

    def _tracing_failed(self, error: BaseException) -> None:
        self._fault = error

    def _store_failed(self, error: BaseException) -> None:
        self._fault = error

    def result(self) -> Path:
        """Return the folder of the run.

        Raises:
            CallError: the call could not be recorded.
        """
        if self._fault is not None:
            raise CallError(f"the call could not be recorded: {self._fault}") from self._fault
        assert isinstance(self.path, Path)
        run = Run(self.path)
        if len(run.records) == 0 and self._uncalled is not None:
            raise CallError(
                f"nothing was recorded: {self._uncalled!r} has called neither the model nor a part "
                "of it"
            )
        if len(run.records) == 0:
            raise CallError(
                "nothing was recorded: the model has no tensors, or the spec selects none of them. "
                'Select modules under `nodes`, as in {all: {select: "**"}}'
            )
        self._check_samples(run)
        return self.path

    def _check_samples(self, run: Run) -> None:
        """Raise an error if pictures or interventions could not be made at all.

        A single one of them says why itself.
        """
        if self._spec.probes and probe_type(_SAMPLES) not in run.types:
            start = f"probe {_SAMPLES!r}: "
            found = [w.removeprefix(start) for w in run.report["warnings"] if w.startswith(start)]
            kinds = {"pictures": self._spec.pictures, "interventions": self._spec.interventions}
            what = " and ".join(kind for kind, declared in kinds.items() if declared)
            why = "; ".join(each.removesuffix(".") for each in found) or "see the report"
            raise CallError(f"no {what} could be made: {why}")


def _remove(folder: Path, owner: int) -> None:
    """Remove the folder of a record, unless a forked child has inherited the object."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
