"""A callback for Lightning: `Trainer(callbacks=[TraceCallback("debug")])`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comgra_decl.annotations import tag
from comgra_decl.errors import MissingPackageError
from comgra_decl.integrations.recording import Recording

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from comgra_decl.spec import Spec
    from comgra_decl.store.location import Location
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError:
            raise MissingPackageError(
                "comgra_decl.integrations.lightning needs the package 'lightning', which is not "
                "installed: pip install 'comgra-decl[lightning]'"
            ) from None


class TraceCallback(Callback):
    """Records what the trainer trains: a run per `fit`.

    Records what the doors would record, and beside it the hyperparameters, the metrics that the
    module logs per epoch (as `trainer/NAME`), and whether an evaluation was a sanity check, a
    validation or a test (as a type of execution).

    Args:
        spec: name of a preset, path of a YAML file, a mapping with the same keys, or a Spec.
        root: folder of all groups; otherwise the spec's, "runs" if it says nothing.
        group: folder of the runs that are looked at together; otherwise the script's name.
        name: the run's own folder; otherwise the time. A name that is taken gets a number.
        overrides: changes to the spec, such as "schedule.every=10".
        stages: what is recorded, each in a run of its own: of "fit", "validate", "test", "predict".

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
        stages: Collection[str] = ("fit",),
    ) -> None:
        self._recording = Recording(spec, root=root, group=group, name=name, overrides=overrides)
        self._stages = frozenset(stages)

    @property
    def path(self) -> Location | None:
        """The folder of the run in progress, or of the last one."""
        return self._recording.path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begins a run."""
        if stage in self._stages:
            self._recording.begin(
                {
                    "hyperparameters": dict(pl_module.hparams),
                    "data": dict(getattr(_data(trainer), "hparams", {})),
                    "trainer": _settings(trainer),
                }
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finishes the run."""
        self._recording.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Finishes the run: `teardown` is not called any more."""
        self._recording.end()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says which evaluation this is."""
        self._tag("sanity_check" if trainer.sanity_checking else "validation")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says which evaluation this is."""
        self._tag("test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says which evaluation this is."""
        self._tag("predict")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the metrics of the validation."""
        if not trainer.sanity_checking:
            self._recording.say(trainer.callback_metrics)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the metrics of the epoch."""
        self._recording.say(trainer.callback_metrics)

    def _tag(self, name: str) -> None:
        if self._recording.open:
            tag(name)


def _data(trainer: Trainer) -> Any:
    return getattr(trainer, "datamodule", None)


def _settings(trainer: Trainer) -> dict[str, Any]:
    """Returns the settings of the trainer that decide what a step is."""
    names = ("max_epochs", "max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val")
    return {name: getattr(trainer, name, None) for name in names}
