"""Train the tutorial with tracing, once with its bug and once without, while the viewer is open.

python examples/demo.py                 # Ctrl-C ends everything
python examples/demo.py steps=500       # further arguments are passed to the training
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = {"with-bug": "true", "without-bug": "false"}  # run name: activation_on_last_layer
USUAL_PORT = 5006

Process = subprocess.Popen[bytes]


def start(*arguments: str, stderr: int | None = None) -> Process:
    """Start a Python program in its own session, so that Ctrl-C does not reach it."""
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=stderr)


def end(process: Process, *, by: signal.Signals, patience: float) -> None:
    """Ask a program to end, wait for it, and kill its remaining processes after `patience`."""
    if process.poll() is not None:
        return
    process.send_signal(by)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """Return Panel's default port if it is free, otherwise any free port."""
    for port in (USUAL_PORT, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise SystemExit("There is no free port on 127.0.0.1.")


def has_display() -> bool:
    """Return whether a browser window can be shown."""
    screens = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform in {"darwin", "win32"} or any(os.environ.get(name) for name in screens)


class Demo:
    """Trains one run after the other, with the viewer alongside."""

    def __init__(self, runs: Path, overrides: Sequence[str]) -> None:
        self.runs = runs
        self.overrides = overrides
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}/viewer"
        self.viewer: Process | None = None
        self.training: Process | None = None
        self.stopping = False

    def run(self) -> int:
        """Run until the viewer ends or the user interrupts; return the exit status."""
        self._view()
        for name, activation in VARIANTS.items():
            self._train(name, activation)
            status = self._wait()
            if status is not None:
                return status
        assert self.viewer is not None
        print(f"\nTraining finished. The viewer runs at {self.address} until Ctrl-C.", flush=True)
        return self.viewer.wait()

    def _view(self) -> None:
        """Start the viewer, which prints its address and, if there is a display, opens a
        browser."""
        show = "--show" if has_display() else "--no-show"
        command = "from comgra_decl.cli.main import main; main()"
        self.viewer = start("-c", command, "view", str(self.runs), f"--port={self.port}", show)

    def _train(self, name: str, activation: str) -> None:
        print(f"\nTraining the tutorial {name.replace('-', ' ')}", flush=True)
        self.training = start(
            "examples/tutorial/train.py",
            "+comgra=debug",
            f"hydra.callbacks.comgra.run.root={self.runs}",
            "hydra.callbacks.comgra.run.group=tutorial",
            f"hydra.callbacks.comgra.run.name={name}",
            f"model.activation_on_last_layer={activation}",
            *self.overrides,
            stderr=subprocess.PIPE,
        )
        threading.Thread(target=self._relay, args=(self.training,), daemon=True).start()

    def _relay(self, training: Process) -> None:
        """Forward the training's error output, except for what our own interrupt causes."""
        assert training.stderr is not None
        with training.stderr as lines:
            for line in lines:
                if not self.stopping:
                    sys.stderr.write(line.decode(errors="replace"))

    def _wait(self) -> int | None:
        """Wait for the training; return an exit status if the demo must end here."""
        assert self.viewer is not None
        assert self.training is not None
        while self.training.poll() is None:
            if self.viewer.poll() is not None:
                return self.viewer.returncode or 1
            time.sleep(0.1)
        return self.training.returncode or None

    def stop(self) -> None:
        """End the training, so that it keeps its records, and then the viewer."""
        self.stopping = True
        if self.training is not None:
            end(self.training, by=signal.SIGINT, patience=10)
        if self.viewer is not None:
            end(self.viewer, by=signal.SIGTERM, patience=5)


def on_signals(action: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Set the handler for the signals that end a program."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, action)


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Interrupt any wait."""
    raise KeyboardInterrupt


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments: `runs`, a folder, and `overrides` for the training."""
    parser = argparse.ArgumentParser(description="Train the tutorial with tracing and view it.")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="folder for the runs")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for the training")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the demo; return the exit status, 0 after Ctrl-C, the normal end of a demo."""
    options = parse(arguments)
    on_signals(interrupt)
    demo = Demo(options.runs.resolve(), options.overrides)
    try:
        return demo.run()
    except KeyboardInterrupt:
        print("\nEnding the demo; the recorded runs are kept in", demo.runs, flush=True)
        return 0
    finally:
        on_signals(signal.SIG_IGN)  # cleaning up takes a moment and must not be interrupted
        demo.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
