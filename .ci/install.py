"""Installs this folder into the environment of the Python that runs this: `install.py '.[dev]'`.

With the versions in `constraints.txt`; with `--oldest`, the oldest ones that pyproject.toml allows.
With uv, which takes seconds where pip takes minutes. uv does not read what pip is configured with,
so that is passed on. Where uv is not to be had, or does not manage, pip does it.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
PIP = [sys.executable, "-m", "pip"]
QUIET = [] if sys.stderr.isatty() else ["--quiet"]
"""Who looks on sees what is loaded; a log does not."""

VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "no-index": "UV_NO_INDEX",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}
"""What uv calls the options of pip that change what is found."""

ALIKE = {"cache-dir", "constraint", "disable-pip-version-check", "no-cache-dir", "no-color"}
ALIKE |= {"no-compile", "no-input", "progress-bar", "quiet", "retries", "root-user-action"}
"""Those that change nothing of what is installed."""


def configured() -> dict[str, str]:
    """What pip was told by its files and by the environment: option to value."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True)
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        found.setdefault(section, {})[option.replace("default-", "")] = ast.literal_eval(value)
    return found["global"] | found["install"] | found[":env:"]


def passed_on() -> dict[str, str]:
    """The same as the variables of uv.

    Raises:
        KeyError: something is configured that uv has no word for.
    """
    told = {VARIABLES[name]: value for name, value in configured().items() if name not in ALIKE}
    if "UV_FIND_LINKS" in told:
        told["UV_FIND_LINKS"] = ",".join(told["UV_FIND_LINKS"].split())
    return told


def by_uv(requirement: str, *, oldest: bool) -> bool:
    """Installs by uv; returns whether that was possible."""
    try:
        told = passed_on()
    except KeyError:
        return False
    if subprocess.call([*PIP, "install", "--quiet", "uv"], stderr=subprocess.DEVNULL):
        return False
    command = [str(Path(sys.executable).with_name("uv")), "pip", "install", *QUIET]
    command += ["--python", sys.executable, "--cache-dir", str(Path(sys.prefix) / ".uv")]
    command += ["--index-strategy", "unsafe-best-match"]
    command += [
        *(["--resolution", "lowest-direct"] if oldest else ["--constraints", str(CONSTRAINTS)])
    ]
    command += ["--editable", requirement]
    return subprocess.call(command, env={**told, **os.environ}) == 0


if __name__ == "__main__":
    *options, wanted = sys.argv[1:]
    oldest = options == ["--oldest"]
    # At once: PyTorch alone may take minutes to come, and nothing else is heard of it.
    sys.stderr.write(f"Installing {wanted} and what it needs into {sys.prefix}: ")
    sys.stderr.write("a minute or several, once\n")
    sys.stderr.flush()
    if not by_uv(wanted, oldest=oldest):
        if oldest:
            sys.exit("Only uv can choose the oldest versions, and it could not be used")
        sys.stderr.write("Installing with pip, which takes a few minutes\n")
        sys.exit(subprocess.call([*PIP, "install", *QUIET, "--editable", wanted]))
