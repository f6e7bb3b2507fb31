"""Run programs with torch and comgra_decl already imported, which saves five seconds each.

They are forked from a process that has only imported modules (and `prepared`), so they are
independent of each other and of the tests; all processes of `pytest -n` share it. `COMGRA` in their
environment has its usual effect. Tests of the start of Python, of its imports or of its exit should
start a new Python instead.
"""

from __future__ import annotations

import atexit
import builtins
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any
from unittest import mock

from comgra_decl.doors.environment import attach
from tests.support import freezing

IMPORTED = ["torch._dynamo", "torch.distributed", "pandas", "hydra", "comgra_decl.record.session"]
IMPORTED += ["comgra_decl.hooks", "comgra_decl.query", "comgra_decl.rules.catalogue"]
IMPORTED += ["comgra_decl.viewer.page", "comgra_decl.viewer.serve", "comgra_decl.keep"]
IMPORTED += ["comgra_decl.cli.main", "comgra_decl.doors.trace", "comgra_decl.record.live_spec"]
IMPORTED += ["tests.support.prepared"]  # last, because it sets aside what has been imported
PATIENCE = 240
ROOT = Path(__file__).parents[2]


class Program:
    """A running `python ARGUMENTS`.

    Args:
        folder: working directory.
        arguments: like those of Python: `-c CODE`, `-m MODULE` or a file, then program arguments.
        env: variables to add to the current environment.

    Attributes:
        out: file with its standard output.
        err: file with its standard error.
    """

    def __init__(
        self, folder: Path, *arguments: object, env: Mapping[str, str] | None = None
    ) -> None:
        assert "COMGRA" not in os.environ, "the process that forks programs must not be traced"
        context = _context()
        self._arguments = [*map(str, arguments)]
        self._output = Path(tempfile.mkdtemp())
        self.out, self.err = self._output / "out", self._output / "err"
        for file in (self.out, self.err):
            file.touch()
        given = (str(folder), self._arguments, {**os.environ, **(env or {})}, str(self._output))
        _same_server()
        self.process: ForkServerProcess = context.Process(target=_be, args=given, daemon=True)
        with _elsewhere():
            self.process.start()

    def ended(self, timeout: float | None = PATIENCE) -> CompletedProcess[str]:
        """Wait for the program to end, and return its result."""
        self.process.join(timeout)
        code = self.process.exitcode
        if code is None:
            self.kill()
            raise TimeoutError(f"{self._arguments} did not end within {timeout} seconds")
        out, err = self.out.read_text(), self.err.read_text()
        shutil.rmtree(self._output)
        return CompletedProcess(self._arguments, code, out, err)

    def wait_for(self, pattern: str, timeout: float = PATIENCE) -> str:
        """Wait until its output matches a pattern; return the first group, or the whole match."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            alive = self.process.is_alive()
            if found := re.search(pattern, self.out.read_text() + self.err.read_text()):
                return found[found.re.groups > 0]
            assert alive, f"{self._arguments} ended:\n{self.err.read_text()}"
            time.sleep(0.02)
        raise TimeoutError(
            f"{self._arguments} printed nothing that matches {pattern}:\n{self.err.read_text()}"
        )

    def interrupt(self) -> CompletedProcess[str]:
        """Interrupt it like Ctrl-C, and return its result."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGINT)
        return self.ended()

    def kill(self) -> None:
        """End it like `kill -9`."""
        self.process.kill()
        self.process.join()


def serve() -> tuple[str, bytes | None]:
    """Start the process that forks programs; return what `use` takes in another process."""
    _context()
    with _elsewhere():
        forkserver.ensure_running()
    server: Any = forkserver._forkserver
    return server._forkserver_address, getattr(server, "_forkserver_authkey", None)


def use(served: tuple[str, bytes | None]) -> None:
    """Fork programs from the process that another one has started with `serve`."""
    server: Any = forkserver._forkserver
    server._forkserver_address, server._forkserver_authkey = served
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # that of `serve` counts


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


@contextmanager
def _elsewhere() -> Iterator[None]:
    """Keep programs from running what a test has left as the main module.

    The server imports `tests` from the working directory.
    """
    with mock.patch.dict(sys.modules, {"__main__": ModuleType("__main__")}), chdir(ROOT):
        yield


def _same_server() -> None:
    """Lets a program's programs come from the server that it comes from, as Python means to.

    Python starts another one, which imports everything again.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_pid is None and server._forkserver_address is not None:
        server.ensure_running = lambda: None


def forked(
    folder: Path,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    timeout: float | None = PATIENCE,
) -> CompletedProcess[str]:
    """Run `python ARGUMENTS` in a folder, and return the result."""
    return Program(folder, *arguments, env=env).ended(timeout)


def _be(folder: str, arguments: list[str], environment: dict[str, str], output: str) -> None:
    """Run the program and end the process; never returns."""
    for number, name in ((1, "out"), (2, "err")):
        with Path(output, name).open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    freezing.hide()
    attach()  # as the import of torch does
    code = _code_of(arguments)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _code_of(arguments: list[str]) -> int:
    """Run the program as Python would, and return its exit code."""
    try:
        _run(arguments)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:  # noqa: BLE001  (Python does the same)
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _run(arguments: list[str]) -> None:
    first, *rest = arguments
    sys.orig_argv = [sys.executable, *arguments]
    if first == "-m":
        sys.argv, sys.path[0] = rest, str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    if first == "-c":
        sys.argv, sys.path[0], name, code = ["-c", *rest[1:]], "", "<string>", rest[0]
    else:
        name, code = first, Path(first).read_text()
        sys.argv, sys.path[0] = arguments, str(Path(first).resolve().parent)
        main.__file__ = name
    exec(compile(code, name, "exec"), vars(main))
