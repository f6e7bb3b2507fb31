"""How many packages each extra installs, and how large they are.

    python -m benchmarks.extras           # the rows of the table in README.md

Counted are the installed versions of everything that comgra_decl requires, except torch and what
torch requires, without the bytecode that pip compiles. Extras whose packages are not
installed here are left out.
"""

from __future__ import annotations

import importlib.metadata as metadata
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
OURS = "comgra-decl"
IN_README = ("", "read", "view", "fast", "all")
"""The extras in the table of README.md; "" for none."""


class Size(NamedTuple):
    """What an extra installs: the number of packages and their size in bytes."""

    packages: int
    size: int


def declared() -> dict[str, list[str]]:
    """Return the requirements of each extra, as pyproject.toml lists them; "" for none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def required(extra: str) -> dict[str, metadata.Distribution]:
    """Return all packages that `pip install comgra-decl[extra]` installs, by name, without ours.

    Raises:
        PackageNotFoundError: one of them is not installed here.
    """
    extras = declared()
    wanted = [Requirement(text) for name in ("", extra) for text in extras[name]]
    found: dict[str, metadata.Distribution] = {}
    done: set[tuple[str, str]] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        for part in ("", *requirement.extras):
            if (name, part) in done:
                continue
            done.add((name, part))
            if name == OURS:
                wanted += map(Requirement, extras[part])
            else:
                found[name] = metadata.distribution(name)
                wanted += _requirements(found[name], part)
    return found


def _requirements(package: metadata.Distribution, extra: str) -> Iterator[Requirement]:
    """Yield what a package, or an extra of it, requires on this machine."""
    for requirement in map(Requirement, package.requires or []):
        if requirement.marker is None:
            applies = not extra
        else:
            applies = requirement.marker.evaluate({"extra": extra}) and (
                not extra or not requirement.marker.evaluate({"extra": ""})
            )
        if applies:
            yield requirement


def size_of(extra: str) -> Size:
    """Return the number and size of the packages of an extra."""
    without = {"torch", *(_closure(metadata.distribution("torch")))}
    packages = [each for name, each in required(extra).items() if name not in without]
    return Size(len(packages), sum(map(_bytes, packages)))


def _closure(package: metadata.Distribution) -> Iterable[str]:
    found: dict[str, None] = {}
    waiting = [package]
    while waiting:
        for requirement in _requirements(waiting.pop(), ""):
            name = canonicalize_name(requirement.name)
            if name in found:
                continue
            found[name] = None
            try:
                waiting.append(metadata.distribution(name))
            except metadata.PackageNotFoundError:  # CUDA's, beside torch for the CPU
                continue
    return found


def _bytes(package: metadata.Distribution) -> int:
    files = (package.locate_file(file) for file in package.files or [] if file.suffix != ".pyc")
    paths = [Path(str(file)) for file in files]
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> None:
    """Print a row of the table for each extra that is installed."""
    for extra in [*IN_README, *(name for name in declared() if name not in IN_README)]:
        try:
            found = size_of(extra)
        except metadata.PackageNotFoundError:
            continue
        print(f"| `{extra or 'none'}` | {found.packages} | {found.size / 1e6:.0f} MB |")


if __name__ == "__main__":
    main()
