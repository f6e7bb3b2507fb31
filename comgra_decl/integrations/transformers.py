"""A callback for the Trainer in transformers: `Trainer(callbacks=[TraceCallback("debug")])`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comgra_decl.errors import MissingPackageError
from comgra_decl.integrations.recording import Recording

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

    from comgra_decl.spec import Spec
    from comgra_decl.store.location import Location
else:
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise MissingPackageError(
            "comgra_decl.integrations.transformers needs the 'transformers' package, which is not "
            "installed: pip install 'comgra-decl[transformers]'"
        ) from None


class TraceCallback(TrainerCallback):
    """Record each call to the Trainer's `train()` as a run.

    Records the same data as the other entry points, and also the training arguments, the model's
    config and the values that the Trainer logs (as `trainer/NAME`). Callbacks are not notified if
    `train()` raises. In that case, the run is finished by the next `train()` or at the end of the
    program.

    Args:
        spec: name of a preset, path of a YAML file, a mapping with the same keys, or a Spec.
        root: folder that contains all groups; defaults to the spec's, or "runs".
        group: name of the folder that contains the runs to be compared; defaults to the script's
            name.
        name: name of the run's own folder; defaults to the current time. If the name already
            exists, a number is appended.
        overrides: changes to the spec, such as "schedule.every=10".

    Raises:
        SpecError: the spec is invalid; lists every problem, one per line.
    """

    def __init__(
        self,
        spec: str | Path | Mapping[str, Any] | Spec = "debug",
        *,
        root: str | Path | None = None,
        group: str | None = None,
        name: str | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        self._recording = Recording(spec, root=root, group=group, name=name, overrides=overrides)

    @property
    def path(self) -> Location | None:
        """The folder of the current run, or of the last one."""
        return self._recording.path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start a run."""
        settings: Any = args
        model: Any = getattr(kwargs.get("model"), "config", None)
        config = {"arguments": settings.to_dict()}
        if hasattr(model, "to_dict"):
            config["model"] = model.to_dict()
        self._recording.begin(config)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record values that the Trainer logs."""
        self._recording.log(logs or {})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Finish the run."""
        self._recording.end()
