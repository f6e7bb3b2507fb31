"""Experiments on copies of the trained models, after the training: what depends on what.

Statistics of tensors cannot show that a model sees the tokens that it should predict, that one
sample influences another, or that an argument is never used. An experiment can: it changes one part
of the input and compares the outputs.

At a few recorded steps, each trained model is copied with some samples of its input. Nothing else
happens while the program trains. After the last step, the newest copies are called with changed
inputs, in evaluation mode, without gradients, and with the same random numbers in each call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.errors import ProbeError, reason_of
from comgra_decl.hooks.graph.telling import padded_share
from comgra_decl.hooks.modes import CallWatch
from comgra_decl.hooks.probing.copying import CleanCopy, is_larger_copy, unwrapped
from comgra_decl.hooks.probing.samples import FirstBatch, Samples
from comgra_decl.hooks.probing.seclusion import Autocast, secluded
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.torch_private import torch_pytree

if TYPE_CHECKING:
    from torch import nn

    from comgra_decl.hooks.plans import TopPlan

DUE = (2, 20)
"""Training steps from which the models are copied, so that short runs have copies as well."""

GROWTH = 4
"""Factor between later steps at which the copies are replaced."""

SAMPLES = 16

_HOST = torch.device("cpu")
_MOST_BYTES = 16 << 20  # of a model, and of its input
_MOST_MODELS = 4
_MOST_TEXT = 200
_SECONDS = 3.0  # for all experiments together
_EXACT = 1e-6  # relative change below which an output is unchanged
_SHARE = 1e-3  # relative change above which an output has changed
_MOST_COLUMNS = 64
_EXTRA = 4  # positions of padding that are appended


@dataclass
class _Kept:
    """A model and its input as they were at one step."""

    copy: CleanCopy
    samples: Samples
    autocast: Autocast | None  # None: the model was on another device
    step: int
    batch: int


@dataclass
class Perturbations:
    """Copies models while a program trains, and experiments with the copies afterwards.

    Attributes:
        kept: the newest copy of each model, by its label.
    """

    kept: dict[str, _Kept] = field(default_factory=dict)
    _due: int = DUE[0]
    _step: int = 0  # the last recorded one
    _tried: set[str] = field(default_factory=set)  # models called in this step
    _refused: dict[str, str] = field(default_factory=dict)  # reasons, by label

    @property
    def due(self) -> bool:
        """Whether models are copied in the recorded step in progress."""
        return self._step >= self._due

    def enter(
        self, module: nn.Module, plan: TopPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Copy a model that is about to be called for the first time in a step that is due."""
        label = plan.top.label
        known = self.kept.get(label)
        if label in self._refused or label in self._tried:
            return
        if (
            module is not plan.top.module()
        ):  # a part, which may lack what follows it or comes before
            self._refused[label] = "the program calls its parts, not the model"
            return
        if known is None and len(self.kept) >= _MOST_MODELS:
            return
        self._tried.add(label)
        try:
            kept = self._copied(module, args, kwargs)
        except Exception as error:  # whatever the program's classes raise
            self._refused[label] = reason_of(error)[:_MOST_TEXT]
            return
        if known is not None:
            known.copy.close()
        self.kept[label] = kept

    def _copied(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Kept:
        given = [t for _, t in (*tensors_in(args), *tensors_in(dict(kwargs)))]
        if _bytes(given) > _MOST_BYTES:
            raise ProbeError(f"the input is larger than {_MOST_BYTES >> 20} MiB")
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        # Changed inputs may be invalid, such as positions beyond the last one. On the host, that is
        # an error like any other. On a device, it would break the program's context.
        autocast = Autocast.now("cpu") if device.type == "cpu" else None
        with secluded(device):
            if is_larger_copy(unwrapped(module), _MOST_BYTES):
                raise ProbeError(
                    f"the model, with all that its attributes hold, is larger than "
                    f"{_MOST_BYTES >> 20} MiB"
                )
            batch = FirstBatch(args, kwargs)
            samples = batch.chosen(SAMPLES, by=None, classes=None)
            args, kwargs = samples.to(_HOST)
            samples = replace(samples, args=args, kwargs=kwargs)
            return _Kept(CleanCopy(module, {}, host=True), samples, autocast, -1, batch.size)

    def ended(self, step: int) -> None:
        """Handle the end of a recorded step."""
        if self._tried:
            self._due = DUE[1] if step < DUE[1] else GROWTH * step
        for label in self._tried & self.kept.keys():
            self.kept[label].step = step
        self._tried.clear()
        self._step = step

    def release(self) -> None:
        """Release all copies."""
        for kept in self.kept.values():
            kept.copy.close()
        self.kept.clear()

    def results(self, clock: Callable[[], float] = time.monotonic) -> list[dict[str, Any]]:
        """Experiment with all copies and release them.

        Returns:
            For each model, its label under "model", the step of the copy under "step", and what was
            found; see `_Perturbed.facts`. Experiments that fail or do not apply are left out.
        """
        end = clock() + _SECONDS
        found = []
        for label, kept in self.kept.items():
            facts: dict[str, Any] = {"model": label, "step": kept.step, "batch": kept.batch}
            try:
                autocast = nullcontext() if kept.autocast is None else kept.autocast.again()
                with secluded(_HOST), torch.no_grad(), autocast:
                    kept.copy.set_mode(False)
                    facts |= _Perturbed(kept, lambda: clock() > end).facts()
            except Exception as error:  # the program's forward does not accept such inputs
                facts["refused"] = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
            found.append(facts)
        for label, reason in self._refused.items():
            if label not in self.kept:
                found.append({"model": label, "step": self._step, "refused": reason})
        self.release()
        return found


class _Dropouts(CallWatch):
    """Collects the dropout functions that are called with `training=True`."""

    def __init__(self) -> None:
        super().__init__()
        self.active: set[str] = set()

    def handle(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the function, and store its name if it drops elements."""
        name = str(getattr(func, "__name__", ""))
        if "dropout" in name:
            given = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
            rate = given.get("p", 0.5)
            if given.get("training", True) and isinstance(rate, (int, float)) and 0 < rate < 1:
                self.active.add(name)
        return func(*args, **kwargs)


class _Perturbed:
    """The experiments with one model."""

    def __init__(self, kept: _Kept, late: Callable[[], bool]) -> None:
        self._kept = kept
        self._late = late
        self._size = len(kept.samples)
        self._given = dict(self._arguments())

    def facts(self) -> dict[str, Any]:
        """Return what was found.

        - "refused": why there were no experiments.
        - "mixes": the largest change to the outputs for a sample when all others are replaced,
          relative to the outputs' standard deviation; likewise below.
        - "ahead": the largest change to the outputs at earlier positions when the input at a later
          position is replaced, and "own" when the input at the same position is.
        - "ignored": arguments and columns that never change the outputs, although they vary.
        - "order": the change when the positions of the tokens are permuted.
        - "padding": the change when more padding is appended.
        - "affine": "bend", the largest deviation of the outputs from an affine function of the
          floating-point arguments, and "reacts", their change when samples are exchanged.
        - "noise": the dropout functions that were active although the model was in evaluation mode.
        """
        everything, again = self._outputs({}), self._outputs({})
        before = _largest(everything)
        if before is None or not all(map(torch.equal, everything, again)):
            return {"refused": "the outputs are not reproducible"}
        self._everything = everything
        if not bool(before.isfinite().all()) or self._size < 2 or not float(before.std()) > 0:
            return {"refused": "the outputs are not finite, or do not vary"}
        self._before, self._scale = before, float(before.std())
        found: dict[str, Any] = {"output": [*before.shape]}
        experiments: dict[str, Callable[[], Any]] = {
            "mixes": lambda: self._mixing,
            "ignored": self._ignored,
            "ahead": self._ahead,
            "order": self._order,
            "padding": self._padding,
            "affine": self._affine,
            "noise": self._noise,
        }
        for name, experiment in experiments.items():
            if self._late():
                break
            try:
                result = experiment()
            except Exception:  # this change is not a valid input
                continue
            if result is not None:
                found[name] = result
        return found

    # -- experiments -----------------------------------------------------------------------------

    @cached_property
    def _mixing(self) -> float | None:
        """Replace all samples but one, along the first dimension of all arguments."""
        if self._before.shape[0] != self._size or self._size in self._before.shape[1:]:
            return None
        if any(t.dim() > 1 and t.shape[1] == self._size for t in self._given.values()):
            return None  # pairs of samples, such as an adjacency matrix
        largest = 0.0
        for kept in (0, self._size - 1):
            index = torch.full((self._size,), (kept + 1) % self._size)
            index[kept] = kept
            changed = {path: _rows(t, index) for path, t in self._given.items()}
            output = self._output(changed)
            if output is None or output.shape != self._before.shape:
                return None
            largest = max(largest, self._change(output[kept], self._before[kept]))
        if largest >= _SHARE and self._mixes_groups():
            return None
        return largest if not self._mixes_instead(largest) else None

    def _mixes_groups(self) -> bool:
        """Return whether samples depend only on those of their group, named by an argument."""
        for tensor in self._given.values():
            if tensor.dim() != 1 or tensor.is_floating_point():
                continue
            changes = []
            for kept in (0, self._size - 1):
                others = tensor != tensor[kept]
                if not bool(others.any()) or int((~others).sum()) < 2:
                    break
                index = torch.arange(self._size, device=tensor.device)
                index[others] = int(others.nonzero()[0])
                changed = {path: _rows(t, index) for path, t in self._given.items()}
                output = self._output(changed)
                if output is None or output.shape != self._before.shape:
                    break
                changes.append(self._change(output[kept], self._before[kept]))
            if len(changes) == 2 and max(changes) < _SHARE:
                return True
        return False

    def _mixes_instead(self, found: float) -> bool:
        """Return whether the samples seem to be along the second dimension (time comes first)."""
        if found < _SHARE:
            return False
        integers = [t for t in self._given.values() if not t.is_floating_point()]
        if any(t.dim() == 1 or padded_share(t) for t in integers):
            return False  # lengths, and rows that end with padding, belong to samples
        for path, tensor in self._given.items():
            if tensor.dim() < 2 or tensor.shape[1] < 2 or self._before.dim() < 2:
                continue
            if tensor.shape[1] != self._before.shape[1]:
                continue
            # The first position of a causal model depends on no other one; the last one does.
            return all(self._is_apart(path, tensor, at) for at in (0, tensor.shape[1] - 1))
        return False

    def _is_apart(self, path: str, tensor: torch.Tensor, kept: int) -> bool:
        """Return whether an output [:, kept] depends only on the same position of an argument."""
        index = torch.full((tensor.shape[1],), (kept + 1) % tensor.shape[1])
        index[kept] = kept
        output = self._output({path: tensor[:, index.to(tensor.device)]})
        if output is None or output.shape != self._before.shape:
            return False
        return self._change(output[:, kept], self._before[:, kept]) < _EXACT

    def _ignored(self) -> list[str]:
        """Permute one argument, or one column of a table, between samples."""
        found = []
        for path, tensor in self._given.items():
            rolled = tensor.roll(1, 0)
            if _same(rolled, tensor):
                continue
            if self._unchanged({path: rolled}):
                found.append(path)
                continue
            columns = tensor.shape[1] if tensor.dim() == 2 else 0
            if not 2 < columns <= _MOST_COLUMNS or not tensor.is_floating_point():
                continue
            for column in range(columns):
                if self._late():
                    return found
                changed = tensor.clone()
                changed[:, column] = rolled[:, column]
                if not _same(changed, tensor) and self._unchanged({path: changed}):
                    found.append(f"{path}[:, {column}]")
        return found

    def _unchanged(self, changed: Mapping[str, torch.Tensor]) -> bool:
        outputs = self._outputs(changed)
        pairs = [*zip(outputs, self._everything, strict=True)]
        if not all(new.shape == old.shape for new, old in pairs):
            return False
        return all(
            self._change(new, old) <= _EXACT if new.is_floating_point() else torch.equal(new, old)
            for new, old in pairs
        )

    def _sequence(self) -> tuple[str, torch.Tensor] | None:
        """Return the last argument [samples, positions, ...] with as many positions as outputs."""
        if self._before.dim() < 3 or self._before.shape[0] != self._size:
            return None
        length = self._before.shape[1]
        found = []
        for path, t in self._given.items():
            # a decoder may leave out the output for the last token
            longer = t.dim() == 2 and t.shape[1] == length + 1 and not t.is_floating_point()
            alike = t.dim() in (2, 3) and t.shape[1] == length
            if t.dtype != torch.bool and (alike or longer):
                found.append((path, t))
        wide = [each for each in found if each[1].dim() == 3 or not each[1].is_floating_point()]
        # of several sequences, such as those of an encoder and a decoder, the last one is decoded
        return wide[-1] if wide and length > 3 else None

    def _ahead(self) -> dict[str, Any] | None:
        """Replace the input at one position, and compare the outputs before it and at it."""
        found = self._sequence()
        if found is None:
            return None
        path, tensor = found
        length, last = tensor.shape[1], self._before.shape[1] - 1
        ahead, own = 0.0, 0.0
        for position in sorted({length // 2, length - 1}):
            changed = tensor.clone()
            changed[:, position] = tensor[:, position].roll(1, 0)
            output = self._output({path: changed})
            if output is None or output.shape != self._before.shape:
                return None
            differs = (changed[:, position] != tensor[:, position]).reshape(self._size, -1).any(1)
            if not bool(differs.any()):
                continue
            new, old = output[differs], self._before[differs]
            ahead = max(ahead, self._change(new[:, :position], old[:, :position]))
            if position <= last:
                own = max(own, self._change(new[:, position], old[:, position]))
        return {"ahead": ahead, "own": own, "argument": path, "positions": length}

    def _tokens(self) -> tuple[str, torch.Tensor] | None:
        found = [
            (path, t)
            for path, t in self._given.items()
            if t.dim() == 2 and not t.is_floating_point() and t.dtype != torch.bool
        ]
        long = [each for each in found if each[1].shape[1] > 3 and int(each[1].max()) > 1]
        return long[0] if len(long) == 1 else None

    def _order(self) -> float | None:
        """Permute the positions of the tokens in the same way for all samples."""
        found = self._tokens()
        if found is None or self._before.shape[0] != self._size:
            return None
        path, tokens = found
        length = tokens.shape[1]
        # Other arguments may have to move along, and integers beside them may be indices.
        if len(self._given) > 1 or padded_share(tokens) or (tokens[:, -1:] == tokens[:, :1]).all():
            return None
        if self._mixing is None or self._mixing >= _SHARE:
            return None  # the first dimension may be time, and the second one the samples
        index = torch.arange(length).roll(length // 2).to(tokens.device)
        output = self._output({path: tokens[:, index]})
        if output is None or output.shape != self._before.shape:
            return None
        expected = self._before
        if self._before.dim() > 2 and self._before.shape[1] == length:
            expected = self._before[:, index]
        return self._change(output, expected)

    def _padding(self) -> float | None:
        """Append padding to the tokens, and compare the outputs of padded samples."""
        found = self._tokens()
        if found is None or not padded_share(found[1]) or self._before.shape[0] != self._size:
            return None
        path, tokens = found
        length = tokens.shape[1]
        pad = tokens[:, -1].mode().values
        padded = tokens[:, -1] == pad
        changed = {path: torch.cat([tokens, pad.expand(self._size, _EXTRA)], 1)}
        for other, tensor in self._given.items():
            if other != path and tensor.shape[:2] == tokens.shape:
                of_padding = tensor[padded][:1, -1:].expand(self._size, _EXTRA, *tensor.shape[2:])
                changed[other] = torch.cat([tensor, of_padding], 1)
        output = self._output(changed)
        if output is None:
            return None
        before = self._before
        if output.dim() > 2 and before.shape[1] == length and output.shape[1] == length + _EXTRA:
            real = (tokens != pad)[padded]
            return self._change(output[padded][:, :length][real], before[padded][real])
        if output.shape != before.shape:
            return None
        return self._change(output[padded], before[padded])

    def _affine(self) -> dict[str, float] | None:
        """Compare the outputs along the lines between the samples with straight lines."""
        ends = [(p, t, t.roll(1, 0)) for p, t in self._given.items() if t.is_floating_point()]
        if not ends:
            return None
        other = self._output({path: b for path, _, b in ends})
        if other is None or other.shape != self._before.shape:
            return None
        bend = 0.0
        for at in (-1.0, 0.5):  # beyond the samples, and between them
            moved = self._output({path: a + at * (b - a) for path, a, b in ends})
            if moved is None or moved.shape != self._before.shape:
                return None
            bend = max(bend, self._change(moved, self._before + at * (other - self._before)))
        return {"bend": bend, "reacts": self._change(other, self._before)}

    def _noise(self) -> list[str] | None:
        """Return the dropout functions that change values in evaluation mode."""
        watch = _Dropouts()
        self._outputs({}, watch)
        return sorted(watch.active) or None

    # -- calls -----------------------------------------------------------------------------------

    def _arguments(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the arguments that have a row for each sample, by path."""
        args, kwargs = self._kept.samples.to(_HOST)
        for path, tensor in (*tensors_in(args), *tensors_in(kwargs)):
            if tensor.dim() and tensor.shape[0] == self._size:
                yield path, tensor

    def _output(self, changed: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Call the copy with some arguments replaced; return its largest output of floats."""
        return _largest(self._outputs(changed))

    def _outputs(
        self, changed: Mapping[str, torch.Tensor], watch: _Dropouts | None = None
    ) -> list[torch.Tensor]:
        """Call the copy with some arguments replaced; return all outputs, floats in float64."""
        args, kwargs = self._kept.samples.to(_HOST)
        by_id = {
            id(tensor): changed[path].clone()  # a model may change its input
            for path, tensor in (*tensors_in(args), *tensors_in(kwargs))
            if path in changed
        }
        args, kwargs = torch_pytree.tree_map_only(
            torch.Tensor, lambda tensor: by_id.get(id(tensor), tensor), (args, kwargs)
        )
        with secluded(_HOST), watch or nullcontext():  # seeds the generators again
            result = self._kept.copy.run(args, kwargs)
        outputs = [t.detach() for _, t in tensors_in(result)]
        return [t.to(torch.float64) if t.is_floating_point() else t for t in outputs]

    def _change(self, new: torch.Tensor, old: torch.Tensor) -> float:
        """Return the largest absolute change, relative to the outputs' standard deviation."""
        return float((new - old).abs().max()) / self._scale if new.numel() else 0.0


def _largest(outputs: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the largest output of floats that is not a scalar, such as a loss."""
    floats = (t for t in outputs if t.is_floating_point() and t.dim())
    return max(floats, key=torch.Tensor.numel, default=None)


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return tensor[index.to(tensor.device)]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one == other).all())
