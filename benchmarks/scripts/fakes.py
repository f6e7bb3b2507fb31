"""Create small files in place of the data that scripts would download."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def make(root: Path, wanted: dict[str, Any]) -> None:
    """Create the files described by one item of an entry's `data`, below `root`."""
    options = dict(wanted)
    kind = options.pop("kind")
    path = root / options.pop("path")
    path.parent.mkdir(parents=True, exist_ok=True)
    KINDS[kind](path, **options)


def pictures(
    path: Path, *, classes: int = 2, count: int = 8, side: int = 64, folders: bool = True
) -> None:
    """Create PNG files, either in one folder per class or all in one folder."""
    from PIL import Image

    drawn = np.random.default_rng(classes * count)
    for label in range(classes):
        folder = path / f"class{label}" if folders else path
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = drawn.integers(0, 90, (side, side, 3))
            pixels[:, label * side // classes : (label + 1) * side // classes] += 120
            name = f"{label}_{number:03}.png"
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name)


def text(
    path: Path, *, lines: int = 200, words: int = 8, vocabulary: int = 60, beginning: str = ""
) -> None:
    """Create lines of words, each with only a few possible successors, after a first line."""
    drawn = random.Random(5)
    known = [
        "".join(drawn.choices("abcdefghijklmnop", k=drawn.randint(2, 6))) for _ in range(vocabulary)
    ]
    written = [beginning] if beginning else []
    for _ in range(lines):
        at, line = drawn.randrange(vocabulary), []
        for _ in range(words):
            line.append(known[at])
            at = (3 * at + drawn.randrange(4)) % vocabulary
        written.append(" ".join(line))
    path.write_text("\n".join(written) + "\n")


def tokens(path: Path, *, count: int = 4000, largest: int = 64) -> None:
    """Create a file of 16-bit numbers."""
    drawn = np.random.default_rng(3)
    steps = np.cumsum(drawn.integers(0, 3, count)) % largest
    steps.astype(np.uint16).tofile(path)


def cora(path: Path, *, papers: int = 2708, words: int = 64) -> None:
    """Create a citation graph as cora.content and cora.cites, plain or in an archive."""
    drawn = np.random.default_rng(11)
    topics = "Case_Based Genetic_Algorithms Neural_Networks Probabilistic_Methods".split()
    topics += "Reinforcement_Learning Rule_Learning Theory".split()
    kinds = drawn.integers(0, 7, papers)
    present = drawn.random((papers, words)) < 0.05 + 0.3 * (np.arange(words) % 7 == kinds[:, None])
    content = "".join(
        "\t".join([str(1000 + n), *(str(int(v)) for v in present[n]), topics[kinds[n]]]) + "\n"
        for n in range(papers)
    )
    pairs = drawn.integers(0, papers, (2 * papers, 2))
    cites = "".join(f"{1000 + a}\t{1000 + b}\n" for a, b in pairs if a != b)
    path.mkdir(parents=True, exist_ok=True)
    (path / "cora.content").write_text(content)
    (path / "cora.cites").write_text(cites)


def packed(path: Path, *, files: dict[str, str]) -> None:
    """Create a tar.gz archive with these files."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content.encode())
            archive.addfile(member, io.BytesIO(content.encode()))


def table(path: Path, *, rows: int = 64) -> None:
    """Create a CSV file of labelled sentences."""
    drawn = random.Random(9)
    words = "good bad fine poor great dull warm cold".split()
    lines = ["sentence,label"]
    for _ in range(rows):
        label = drawn.randrange(2)
        chosen = [words[2 * drawn.randrange(4) + label] for _ in range(6)]
        lines.append(f"{' '.join(chosen)},{label}")
    path.write_text("\n".join(lines) + "\n")


def written(path: Path, *, text: str) -> None:
    """Create a file with this text."""
    path.write_text(text)


KINDS: dict[str, Callable[..., None]] = {
    each.__name__: each for each in (pictures, text, tokens, cora, packed, table, written)
}
