"""Start scripts: watched, plain, and traced."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from benchmarks.scripts import fakes
from benchmarks.scripts.catalogue import Block, Entry

INSIDE = Path(__file__).with_name("inside")
BESIDE = Path(sys.prefix) / "scripts"
"""Packages that only scripts need (`make scripts` installs them)."""
ZOO = Path(sys.prefix) / "zoo"
"""torchvision and timm; separate, as other libraries use torchvision if they find it."""

_IN_ZOO = ("timm", "torchvision")
_INTERRUPTED = (-signal.SIGINT, 130, 1)
_WALL = 1800.0
_TIMES = re.compile(
    r"ms/batch +\d+(\.\d+)?|(Time|Data) +\d+\.\d+ \( *\d+\.\d+\)"
    r"|\d+:\d\d(:\d\d)?(\.\d+)?|\d+(\.\d+)?(e-\d+)?\s?(ms|s|sec|secs|seconds|min)\b"
    r"|\d+(\.\d+)?\s?(it/s|s/it|tok/s|FPS|fps|B/s)|\d{4}-\d\d-\d\d|0x[0-9a-f]{6,}"
)

Kind = Literal["calls", "bits"]

Launch = Callable[[list[str], Path, dict[str, str]], "Launched"]
"""Runs `python ARGUMENTS` in a folder with these environment variables, and waits for it."""


@dataclass
class Launched:
    """The result of a process; `seconds` is its processor time, if measured."""

    code: int
    output: str
    errors: str
    seconds: float | None = None


@dataclass
class Started:
    """The result of one start of a script."""

    code: int
    output: list[str]
    errors: str
    processes: list[dict[str, Any]]
    seconds: float
    files: dict[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> list[str]:
        """Lines that tracing wrote to standard error."""
        lines = [line.strip() for line in self.errors.splitlines()]
        return [re.sub(r"/\S*/(?=comgra_decl/)", "", line) for line in lines if "comgra" in line]


def missing(entry: Entry) -> str:
    """Return why an entry cannot be run in this environment, or "" if it can."""
    for package in entry.needs:
        folders = [ZOO] if package in _IN_ZOO else [BESIDE]
        if any((folder / package).exists() for folder in folders):
            continue
        if importlib.util.find_spec(package) is None:
            return f"needs the {package} package; `make scripts` installs it"
    return ""


def start(
    entry: Entry,
    tree: Path,
    scratch: Path,
    *,
    watch: Kind,
    runs: Path | None = None,
    launch: Launch | None = None,
) -> Started:
    """Start the script once, in a fresh copy of its part of the repository.

    Args:
        entry: the script.
        tree: the repository's files.
        scratch: a folder for this entry only. All starts use the same subfolder, because scripts
            print and store paths.
        watch: "calls" to observe what the script does, "bits" for digests.
        runs: root folder of the runs; None for no tracing.
        launch: function that starts the process; None for a new Python process.
    """
    launch = launch or started
    work, answer = scratch / "work", scratch / "answer"
    for folder in (work, answer, scratch / "home"):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tree / entry.folder, work, symlinks=True)
    answer.mkdir()
    (scratch / "home").mkdir()
    for wanted in entry.data:
        fakes.make(work, wanted)
    environment = _environment(entry, work, scratch)
    for command in entry.prepare:
        done = subprocess.run(
            [sys.executable, *shlex.split(command)],
            cwd=work / entry.at,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}: {done.stderr[-600:]}"
    if entry.block is not None:
        (work / "example.py").write_text(_example(tree, entry.block))
    before = _files(work)
    environment |= {
        "SCRIPTS_WATCH": watch,
        "SCRIPTS_ANSWER": str(answer),
        "SCRIPTS_STOP": str(entry.stop),
    }
    if watch == "calls":
        environment["TORCHDYNAMO_DISABLE"] = "1"
    arguments = shlex.split(entry.command)
    if runs is not None and entry.door == "hydra":
        arguments += ["+comgra=debug", f"hydra.callbacks.comgra.run.root={runs}"]
    elif runs is not None:
        environment |= {"COMGRA": "debug", "COMGRA_OVERRIDES": f"run.root={runs}"}
    ended = launch(arguments, work / entry.at, environment)
    processes = [json.loads(file.read_text()) for file in sorted(answer.glob("*.json"))]
    seconds = ended.seconds
    if seconds is None:
        seconds = sum(process["used"] for process in processes)
    seconds -= sum(process.get("seconds", 0.0) for process in processes)
    left = {
        name: digest
        for name, digest in _files(work).items()
        if before.get(name) != digest and not any(fnmatch(name, g) for g in _globs(entry))
    }
    lines = _lines(entry, ended.output)
    return Started(ended.code, lines, ended.errors, processes, seconds, left)


def _example(tree: Path, block: Block) -> str:
    """Return an example from a page in Markdown or reStructuredText."""
    page = (tree / block.file).read_text()
    fenced = r"```python\n(.*?)```|\.\. code-block:: python\n\n((?:(?: +.*)?\n)+)"
    found = re.findall(fenced, page, flags=re.DOTALL if block.file.endswith(".md") else 0)
    text = textwrap.dedent("".join(found[block.number]))
    for old, new in block.replace.items():
        assert old in text, f"{old!r} is not in the example"
        text = text.replace(old, new)
    return text


def ends(entry: Entry) -> tuple[int, ...]:
    """Return the valid exit codes of the script."""
    return (*entry.ends, *_INTERRUPTED) if entry.stop else entry.ends


def last(text: str) -> str:
    """Return the last line of output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def _environment(entry: Entry, work: Path, scratch: Path) -> dict[str, str]:
    beside = [ZOO] if set(_IN_ZOO) & set(entry.needs) else []
    paths = [INSIDE, *(work / path for path in entry.path), *beside, BESIDE]
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    return kept | {
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths),
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MPLBACKEND": "Agg",
        "HOME": str(scratch / "home"),
        "USER": "user",
        "TMPDIR": str(scratch / "home"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "SCRIPTS_SAMPLES": str(entry.samples),
        "SCRIPTS_LIMIT": str(entry.limit),
        **entry.environment,
    }


def started(arguments: list[str], folder: Path, environment: dict[str, str]) -> Launched:
    """Start a new Python process, as a user would."""
    limit = int(environment["SCRIPTS_LIMIT"])
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5)),
            start_new_session=True,
        )
        try:
            process.wait(_WALL)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return Launched(process.returncode, texts[0], texts[1], used)


def forked(arguments: list[str], folder: Path, environment: dict[str, str]) -> Launched:
    """Fork a process that has imported torch, which saves seconds per start."""
    from tests.support import forked

    begin = str(INSIDE / "begin.py")
    done = forked.Program(folder, begin, *arguments, env=environment).ended(_WALL)
    return Launched(done.returncode, done.stdout, done.stderr)


# -- results of a start --------------------------------------------------------------------------

_ALWAYS_DIFFERENT = ("*.pyc", "*tfevents*", "*.log", "*/.hydra/*", "runs/*", "*.lock")


def _globs(entry: Entry) -> list[str]:
    return [*_ALWAYS_DIFFERENT, *(g for g in entry.ignore if not g.startswith("line:"))]


def _files(folder: Path) -> dict[str, str]:
    """Return a digest of each file; for archives such as checkpoints, of their contents."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            found[str(path.relative_to(folder))] = _file_digest(path)
    return found


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if not name.endswith(".data/serialization_id"):
                    digest.update(archive.read(name))
    else:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _lines(entry: Entry, output: str) -> list[str]:
    """Return the printed lines without times; for lines that overwrite themselves, the last."""
    dropped = [g.removeprefix("line:") for g in entry.ignore if g.startswith("line:")]
    kept = []
    for line in output.split("\n"):
        last = line.split("\r")[-1].rstrip()
        if not any(re.search(pattern, last) for pattern in dropped):
            kept.append(_TIMES.sub("<time>", last))
    return kept
