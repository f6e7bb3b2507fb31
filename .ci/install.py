"""Install this folder into the environment of the running Python: `install.py '.[dev]'`.

Uses the versions in `constraints.txt` or, with `--oldest`, the oldest that pyproject.toml allows.
Installs with uv, which takes seconds where pip takes minutes. uv does not read pip's
configuration, so it is translated to uv's variables. If uv is unavailable or fails, pip is used.
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
"""Show progress in a terminal, not in a log."""

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
"""uv's names for the options of pip that affect which packages are found."""

IGNORED = {"cache-dir", "constraint", "disable-pip-version-check", "no-cache-dir", "no-color"}
IGNORED |= {"no-compile", "no-input", "progress-bar", "quiet", "retries", "root-user-action"}
"""Options of pip that do not affect what is installed."""


def configured() -> dict[str, str]:
    """Return pip's options from its files and the environment, as a dict of option to value."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True)
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        found.setdefault(section, {})[option.replace("default-", "")] = ast.literal_eval(value)
    return found["global"] | found["install"] | found[":env:"]


def uv_variables() -> dict[str, str]:
    """Return pip's configuration as environment variables of uv.

    Raises:
        KeyError: an option is set that uv has no variable for.
    """
    options = configured().items()
    variables = {VARIABLES[name]: value for name, value in options if name not in IGNORED}
    if "UV_FIND_LINKS" in variables:
        variables["UV_FIND_LINKS"] = ",".join(variables["UV_FIND_LINKS"].split())
    return variables


def install_with_uv(requirement: str, *, oldest: bool) -> bool:
    """Install with uv and return whether that succeeded."""
    try:
        variables = uv_variables()
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
    return subprocess.call(command, env={**variables, **os.environ}) == 0


if __name__ == "__main__":
    *options, wanted = sys.argv[1:]
    oldest = options == ["--oldest"]
    # Printed first: downloading PyTorch alone may take minutes, without any other output.
    sys.stderr.write(f"Installing {wanted} and its dependencies into {sys.prefix}: ")
    sys.stderr.write("a minute or more, only once\n")
    sys.stderr.flush()
    if not install_with_uv(wanted, oldest=oldest):
        if oldest:
            sys.exit("The oldest versions can only be resolved by uv, which could not be used")
        sys.stderr.write("Installing with pip, which takes a few minutes\n")
        sys.exit(subprocess.call([*PIP, "install", *QUIET, "--editable", wanted]))
