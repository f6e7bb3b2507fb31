"""Install the tools for comparison into a separate folder.

comgra and its dependencies contain a pytest plugin and packages called `scripts` and `assets`.
Therefore, they are never installed into the environment itself; instead, `build/peers` is appended
to the import path of the benchmark process. Its recorder needs only the packages listed in
`peers.txt`.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "build" / "peers"
REQUIREMENTS = Path(__file__).with_name("peers.txt")


def make_importable() -> bool:
    """Append the peers' folder to the import path; return whether comgra can be imported."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
        importlib.invalidate_caches()
    return importlib.util.find_spec("comgra") is not None


def install() -> bool:
    """Install the peers if necessary; return whether comgra can be imported."""
    if make_importable():
        return True
    command = [*_installer(), "--quiet", "--no-deps", "--target", str(FOLDER)]
    print(f"installing comgra for comparison into {FOLDER.name}/ ...", file=sys.stderr)
    subprocess.run([*command, "-r", str(REQUIREMENTS)], check=False)
    return make_importable()


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    uv = shutil.which("uv") or "uv"
    return [uv, "pip", "install", "--python", sys.executable]


if __name__ == "__main__":
    sys.exit(not install())
