"""Tracing Hydra applications: `python train.py +comgra=debug`."""

from __future__ import annotations

import copy
import inspect
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from comgra_decl.doors.start import finish_session, start_session
from comgra_decl.errors import SpecError, wrong_spec
from comgra_decl.record.context import RunContext
from comgra_decl.record.secrets import masked

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import TaskFunction

    from comgra_decl.record.session import Session
    from comgra_decl.spec import Spec

_SETTINGS = "_settings_"
"""Key of the callback's own config that contains `+comgra.KEY=VALUE` until the job starts."""


class TraceCallback(Callback):
    """Record every job of a Hydra application as its own run.

    Hydra creates one callback for all jobs of a multirun, and a launcher may pickle it for other
    processes. The constructor therefore reads nothing; the spec is taken from the job's config.
    """

    def __init__(self, **_spec: Any) -> None:
        self._session: Session | None = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Remove comgra's settings from the config that the application receives.

        In a multirun, the settings remain, because the jobs receive a different config object.
        """
        overlay = OmegaConf.select(config, "comgra")
        if isinstance(overlay, DictConfig):
            hydra = config.hydra
            with open_dict(config), read_write(config), open_dict(hydra), read_write(hydra):
                del config["comgra"]
                hydra.callbacks.comgra[_SETTINGS] = overlay

    def on_job_start(
        self, config: DictConfig, *, task_function: TaskFunction, **kwargs: Any
    ) -> None:
        """Start recording; end the program if the spec is invalid."""
        self._finish()
        try:
            spec = job_spec(config)
        except SpecError as error:
            # Hydra turns every other exception of a callback into a warning.
            raise SystemExit(wrong_spec(error)) from None
        self._session = start_session(spec, job_context(config, task_function))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Finish the run. If a job ends without this call, its session finishes by itself."""
        failed = getattr(job_return, "status", None) is JobStatus.FAILED
        returned = getattr(job_return, "_return_value", None) if failed else None
        self._finish(returned if isinstance(returned, BaseException) else None)

    def _finish(self, error: BaseException | None = None) -> None:
        session, self._session = self._session, None
        if session is not None:
            finish_session(session, error)

    def __getstate__(self) -> dict[str, Any]:
        return {"_session": None}  # a session belongs to its process


def job_spec(config: DictConfig) -> Spec:
    """Return the spec of a job: the preset, merged with an optional top-level `comgra`.

    Raises:
        SpecError: the spec is invalid.
    """
    from comgra_decl.doors.checked_spec import declared

    config = copy.deepcopy(config)
    spec = config.hydra.callbacks.comgra
    OmegaConf.set_readonly(spec, False)
    OmegaConf.set_struct(spec, False)
    overlay = spec.pop(_SETTINGS, OmegaConf.select(config, "comgra"))
    if isinstance(overlay, DictConfig):
        spec.merge_with(overlay)
    elif overlay is not None:
        raise SpecError([f"comgra: {overlay!r} is not a mapping of keys to values"])
    return declared(spec)


def job_context(config: DictConfig, task_function: TaskFunction) -> RunContext:
    """Return the run context of a job.

    The base folder is the program's initial working directory, even if Hydra changed it.
    """
    return RunContext(
        config=saved_config(config),
        job=config.hydra.job.name,
        base=Path(config.hydra.runtime.cwd),
        script=_source(task_function),
    )


def _source(task_function: TaskFunction) -> Path | None:
    try:
        found = inspect.getsourcefile(inspect.unwrap(task_function))
    except TypeError:
        return None
    return None if found is None else Path(found)


_NOT_THE_APPS = ("hydra", "comgra")
"""Top-level keys that belong to Hydra or comgra."""


def saved_config(config: DictConfig) -> dict[str, Any]:
    """Return the application's part of a composed config, as plain JSON data.

    Interpolations are resolved, except those that cannot be resolved and those that read the
    environment, which may contain secrets. If a config contains itself, none of its interpolations
    are resolved.
    """
    written = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    assert isinstance(written, dict)
    written = {str(key): value for key, value in written.items() if key not in _NOT_THE_APPS}
    try:
        plain = _plain(OmegaConf.create(_quoted(written)))
    except RecursionError:
        plain = written
    content = masked(plain)
    assert isinstance(content, dict)
    return content


def _quoted(written: Any) -> Any:
    """Return the config with environment interpolations escaped."""
    if isinstance(written, dict):
        return {key: _quoted(value) for key, value in written.items()}
    if isinstance(written, list):
        return [_quoted(value) for value in written]
    if isinstance(written, str) and "oc.env:" in written:
        return written.replace("${", r"\${")
    return written


def _plain(node: Any) -> Any:
    if isinstance(node, DictConfig):
        return {str(key): _entry(node, key) for key in node}
    if isinstance(node, ListConfig):
        return [_entry(node, index) for index in range(len(node))]
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    return node.name if isinstance(node, Enum) else str(node)


def _entry(node: DictConfig | ListConfig, key: Any) -> Any:
    try:
        return _plain(node[key])
    except OmegaConfBaseException:
        written: Any = OmegaConf.to_container(node, resolve=False)
        return written[key]
