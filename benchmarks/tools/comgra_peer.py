"""comgra 0.11.5 recording the same tensors, with the calls a user would write by hand.

comgra requires seven kinds of calls in the training loop. Forward hooks and a wrapper around the
step make them, so that the loop itself is the same for every tool.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from benchmarks.nets import Training
from benchmarks.tools.base import CommitClock, Step, Tool, timed_method

GROUP, TRIAL = "benchmark", "trial"
GRADIENTS = "gradients"
CARRIED_OVER = "*old"  # a reference from an earlier iteration, not a record of its own
SAMPLES = 8
MOST_VALUES = 4_000_000  # per step; each costs comgra about 20 us and 40 bytes


class ComgraPeer(Tool):
    """comgra recording every step with one of its recording types, `kpis` or `neuron`.

    Its optional singular values are disabled, because no other tool computes them.
    """

    most_records = 2  # all its records have the same size
    requires = ("comgra",)
    warmup_fraction = 0.0  # its steps are long, and the first one serves as warm-up

    def __init__(self, name: str, label: str, *, recording_type: str) -> None:
        self.name, self.label = name, label
        self._type = recording_type

    def refuses(self, training: Training) -> str | None:
        """Refuse training runs for which a single step would take minutes."""
        values = self._values_per_step(training)
        if values <= MOST_VALUES:
            return None
        return f"{values / 1e6:.0f} million values per step: minutes and gigabytes for each step"

    def _values_per_step(self, training: Training) -> int:
        """Return the number of output values (and gradients) that would be written one by one."""
        if self._type != "neuron":
            return 0
        counts: list[int] = []

        def count(module: nn.Module, args: object, output: object) -> None:
            del module, args
            counts.extend(t.numel() // len(t) for _, t in tensors("", output))

        with ExitStack() as hooks:
            for module in training.model.modules():
                hooks.enter_context(module.register_forward_hook(count))
            training.step()
        return 2 * sum(counts) * (min(SAMPLES, training.batch_size) + 3)

    @contextmanager
    def attach(self, training: Training, folder: Path) -> Iterator[Step]:
        """Yield a step with comgra's calls around it."""
        recorder = _new_recorder(folder, training.model)
        calls = _Calls(recorder, training, recording_type=self._type)
        with ExitStack() as hooks:
            for path, module in training.model.named_modules():
                hooks.enter_context(module.register_forward_hook(calls.on_forward(path)))
            yield calls.step
        recorder.finalize()

    def records(self, folder: Path) -> int:
        """Return the number of recorded steps, each of which has a folder."""
        return len(list(_recordings(folder).iterdir()))

    def series(self, folder: Path) -> int:
        """Return the distinct (name, pass) pairs of the newest record."""
        return len({key[:4] for key, _ in _entries(folder) if not key[2].endswith(CARRIED_OVER)})

    def commits(self) -> AbstractContextManager[CommitClock]:
        """Time `finish_batch`, which turns tensors into records and writes them."""
        return timed_method(import_module("comgra.recorder").ComgraRecorder, "finish_batch")


class _Calls:
    """The calls in comgra's protocol, in the required order."""

    def __init__(self, recorder: Any, training: Training, *, recording_type: str) -> None:
        self._recorder = recorder
        self._training = training
        self._type = recording_type
        self._root = type(training.model).__name__
        self._seen: set[str] = set()
        self._count = 0

    def step(self) -> Tensor:
        """Run one recorded training step."""
        recorder = self._recorder
        recorder.start_batch(self._count, self._training.batch_size)
        self._seen.clear()
        recorder.start_iteration()
        loss = self._training.step()
        recorder.register_tensor("loss", loss, is_loss=True)
        recorder.record_current_gradients(GRADIENTS)
        recorder.finish_iteration()
        recorder.finish_batch()
        self._count += 1
        return loss

    def on_forward(self, path: str) -> Any:
        """Return a forward hook that registers the outputs of the module at `path`."""
        node = path or self._root

        def register(module: nn.Module, args: object, output: object) -> None:
            del module, args
            self._iteration_of(node)
            for role, tensor in tensors("output", output):
                self._recorder.register_tensor(f"{node}.{role}", tensor, recording_type=self._type)

        return register

    def _iteration_of(self, node: str) -> None:
        """Start comgra's next iteration when a module is called again within the step."""
        if node in self._seen:
            self._recorder.finish_iteration()
            self._recorder.start_iteration()
            self._seen.clear()
        self._seen.add(node)


def _new_recorder(folder: Path, model: nn.Module) -> Any:
    objects = import_module("comgra.objects")
    # Its graph walk recurses once per operation, and a transformer has many.
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 20_000))
    recorder = import_module("comgra.recorder").ComgraRecorder(
        comgra_root_path=folder,
        group=GROUP,
        trial_id=TRIAL,
        decision_maker_for_recordings=objects.DecisionMakerForRecordingsFrequencyPerType(1),
        max_num_batch_size_to_record=SAMPLES,
        calculate_svd_and_other_expensive_operations_of_parameters=False,
    )
    recorder.track_module(type(model).__name__, model)
    return recorder


def tensors(role: str, output: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module's output with their roles: `output`, `output[1]`, ..."""
    if isinstance(output, Tensor):
        yield role, output
    elif isinstance(output, (tuple, list)):
        for i, part in enumerate(output):
            yield from tensors(f"{role}[{i}]", part)


def read_records(folder: Path, step: int | None = None) -> dict[tuple[Any, ...], float]:
    """Read one recorded step as comgra stored it, the newest by default.

    Returns:
        A dict from (pass, iteration, node, role, batch aggregation, item, neuron) to value; a
        tensor that was registered under several names appears only under the first.
    """
    return {key: entry["val"] for key, entry in _entries(folder, step) if "val" in entry}


def _recordings(folder: Path) -> Path:
    return folder / GROUP / "trials" / TRIAL / "recordings"


def _entries(
    folder: Path, step: int | None = None
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield every record, including those that only refer to another one."""
    unpack = import_module("msgpack").unpackb
    recordings = _recordings(folder)
    newest = max(int(path.name.split("__")[0]) for path in recordings.iterdir())
    (place,) = recordings.glob(f"{newest if step is None else step}__*")
    for file in sorted(place.iterdir()):
        names, frequent, encoded = unpack(file.read_bytes())["recordings"]
        for codes, entry in encoded:
            key = dict(zip(names, (frequent[str(code)] for code in codes), strict=True))
            if key["record_type"] == "data":
                yield _identity(key), entry


def _identity(key: dict[str, Any]) -> tuple[Any, ...]:
    order = ("type_of_tensor_recording", "iteration", "node_name", "role_within_node")
    return *(key[name] for name in order), key["batch_aggregation"], key["item"], key["metadata"]


COMGRA: tuple[Tool, ...] = (
    ComgraPeer("comgra", "comgra 0.11.5, kpis", recording_type="kpis"),
    ComgraPeer("comgra-neuron", "comgra 0.11.5, neuron (its default)", recording_type="neuron"),
)
