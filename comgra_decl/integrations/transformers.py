"""A callback for the Trainer of transformers: `Trainer(callbacks=[TraceCallback("debug")])`."""

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
            "comgra_decl.integrations.transformers needs the package 'transformers', which is not "
            "installed: pip install 'comgra-decl[transformers]'"
        ) from None


class TraceCallback(TrainerCallback):
    """Records what the Trainer trains: a run per `train()`.

    Records what the doors would record, and beside it the training arguments, the model's config
    and what the Trainer logs (as `trainer/NAME`). If `train()` raises, nobody tells a callback: the
    run is finished by the next `train()` or when the program ends.

    Args:
        spec: name of a preset, path of a YAML file, a mapping with the same keys, or a Spec.
        root: folder of all groups; otherwise the spec's, "runs" if it says nothing.
        group: folder of the runs that are looked at together; otherwise the script's name.
        name: the run's own folder; otherwise the time. A name that is taken gets a number.
        overrides: changes to the spec, such as "schedule.every=10".

    Raises:
        SpecError: the spec is wrong; carries every problem, one line each.
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
        """The folder of the run in progress, or of the last one."""
        return self._recording.path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begins a run."""
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
        """Notes what the Trainer logs."""
        self._recording.log(logs or {})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Finishes the run."""
        self._recording.end()
