"""For Lightning: `Trainer(callbacks=[TraceCallback("debug")], logger=TraceLogger())`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comgra_decl.annotations import tag
from comgra_decl.errors import MissingPackageError
from comgra_decl.integrations.recording import Recording, log_numbers

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import Logger

    from comgra_decl.spec import Spec
    from comgra_decl.store.location import Location
else:
    try:
        from lightning.pytorch import Callback
        from lightning.pytorch.loggers import Logger
    except ImportError:
        try:
            from pytorch_lightning import Callback
            from pytorch_lightning.loggers import Logger
        except ImportError:
            raise MissingPackageError(
                "comgra_decl.integrations.lightning needs the 'lightning' package, which is not "
                "installed: pip install 'comgra-decl[lightning]'"
            ) from None


class TraceCallback(Callback):
    """Record each call to the trainer's `fit` as a run.

    Records the same data as the other entry points, and also the hyperparameters and the metrics
    that the module logs per epoch (as `trainer/NAME`). The type of execution tells whether an
    evaluation was a sanity check, a validation or a test.

    Args:
        spec: name of a preset, path of a YAML file, a mapping with the same keys, or a Spec.
        root: folder that contains all groups; defaults to the spec's, or "runs".
        group: name of the folder that contains the runs to be compared; defaults to the script's
            name.
        name: name of the run's own folder; defaults to the current time. If the name already
            exists, a number is appended.
        overrides: changes to the spec, such as "schedule.every=10".
        stages: the stages to record, each as its own run: any of "fit", "validate", "test",
            "predict".

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
        stages: Collection[str] = ("fit",),
    ) -> None:
        self._recording = Recording(spec, root=root, group=group, name=name, overrides=overrides)
        self._stages = frozenset(stages)
        self._before: dict[str, float] = {}  # the metrics when the validation in progress began
        self._validated: set[str] = set()  # metrics that validations log

    @property
    def path(self) -> Location | None:
        """The folder of the current run, or of the last one."""
        return self._recording.path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start a run."""
        if stage in self._stages:
            self._recording.begin(
                {
                    "hyperparameters": dict(pl_module.hparams),
                    "data": dict(getattr(_data(trainer), "hparams", {})),
                    "trainer": _settings(trainer),
                }
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finish the run."""
        self._recording.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Finish the run, because `teardown` will not be called."""
        self._recording.end(exception)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tag the evaluation as a sanity check or a validation."""
        self._tag("sanity_check" if trainer.sanity_checking else "validation")
        self._before = _numbers(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tag the evaluation as a test."""
        self._tag("test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tag the evaluation as a prediction."""
        self._tag("predict")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the validation metrics."""
        found = _numbers(trainer)
        changed = {name for name, value in found.items() if value != self._before.get(name)}
        self._validated |= changed
        if not trainer.sanity_checking:
            self._recording.log({name: found[name] for name in found if name in self._validated})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the epoch's metrics, without those of the validation, which are recorded."""
        found = _numbers(trainer)
        self._recording.log({name: found[name] for name in found if name not in self._validated})

    def _tag(self, name: str) -> None:
        if self._recording.open:
            tag(name)


def _numbers(trainer: Trainer) -> dict[str, float]:
    """Return what the module has logged; Lightning keeps each value until it is logged again."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class TraceLogger(Logger):
    """Store what the module logs as metrics of the run that is being recorded.

    `self.log("val_loss", value)` becomes the metric "val_loss", at the step in progress or, if
    called after the optimizer step, at the step that has just ended. The logger starts no run: use
    it with `TraceCallback`, with `COMGRA=debug` or with another entry point. Without a run, it does
    nothing. It can be used beside other loggers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._version = f"{datetime.now():%Y-%m-%d_%H-%M-%S}"

    @property
    def name(self) -> str:
        """Name of the folder in which Lightning stores checkpoints if this is the only logger."""
        return "comgra"

    @property
    def version(self) -> str:
        """Name of the folder in it; the time at which the logger was created."""
        return self._version

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log each number; Lightning's own step is not used."""
        log_numbers(metrics)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `TraceCallback` saves hyperparameters when it starts the run."""


def _data(trainer: Trainer) -> Any:
    return getattr(trainer, "datamodule", None)


def _settings(trainer: Trainer) -> dict[str, Any]:
    """Return the trainer's settings that define a step."""
    names = ("max_epochs", "max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val")
    return {name: getattr(trainer, name, None) for name in names}
