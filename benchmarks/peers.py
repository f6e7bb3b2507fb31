"""Install the tools for comparison into a separate folder.

comgra and its dependencies contain a pytest plugin and packages called `scripts` and `assets`.
Therefore, they are never installed into the environment itself; instead, `build/peers` is appended
to the import path of the benchmark process. Its recorder needs only the packages listed in
`peers.txt`. Its viewer runs in a process of its own, with the packages in `peers-viewer.txt`, among
them the last Dash that it starts with.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "build" / "peers"
REQUIREMENTS = Path(__file__).with_name("peers.txt")
VIEWER_FOLDER = FOLDER.with_name("peers-viewer")


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
    _install(FOLDER, REQUIREMENTS)
    return make_importable()


def install_viewer() -> bool:
    """Install comgra's viewer if necessary; return whether it is there."""
    if not VIEWER_FOLDER.is_dir():
        _install(VIEWER_FOLDER, REQUIREMENTS.with_name("peers-viewer.txt"))
    return (VIEWER_FOLDER / "dash").is_dir()


def _install(folder: Path, requirements: Path) -> None:
    command = [*_installer(), "--quiet", "--no-deps", "--target", str(folder)]
    print(f"installing comgra for comparison into {folder.name}/ ...", file=sys.stderr)
    subprocess.run([*command, "-r", str(requirements)], check=False)


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    uv = shutil.which("uv") or "uv"
    return [uv, "pip", "install", "--python", sys.executable]


if __name__ == "__main__":
    sys.exit(not install())
