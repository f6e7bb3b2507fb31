"""Text is legible: WCAG 2.1, 1.4.3 requires a contrast of 4.5 to 1, in light and dark mode."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from comgra_decl.viewer import shell

FOLDER = Path(shell.__file__).parent
LEAST = 4.5
Colour = tuple[float, float, float]

MIXES = [  # style sheet, and how its faint text is mixed from the text and background colours
    ("style.css", r"--soft: color-mix\(in srgb, var\(--text\) (\d+)%"),
    ("style.css", r"\.missing \{ color: color-mix\(in srgb, var\(--text\) (\d+)%"),
    ("components/graph.css", r"--soft: color-mix\(in srgb, var\(--ink-page\) (\d+)%"),
    ("components/stepbar.css", r"--soft: color-mix\(in srgb, var\(--ink-page\) (\d+)%"),
    ("components/chooser.css", r"--soft: color-mix\(in srgb, var\(--text\) (\d+)%"),
]


def channels(colour: str) -> Colour:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def mixed(above: Colour, below: Colour, share: float) -> Colour:
    red, green, blue = (a * share + b * (1 - share) for a, b in zip(above, below, strict=True))
    return red, green, blue


def luminance(colour: Colour) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Colour, other: Colour) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_formula_is_that_of_the_standard() -> None:
    assert contrast(channels("#000000"), channels("#ffffff")) == pytest.approx(21)
    assert contrast(channels("#767676"), channels("#ffffff")) == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("theme", shell.THEMES.values(), ids=list(shell.THEMES))
@pytest.mark.parametrize("ground", ["background", "surface"])
@pytest.mark.parametrize(("sheet", "pattern"), MIXES)
def test_soft_text_is_not_too_soft(
    theme: dict[str, str], ground: str, sheet: str, pattern: str
) -> None:
    found = re.search(pattern, (FOLDER / sheet).read_text())
    assert found is not None, "the style sheet says it differently now: say so here"
    below = channels(theme[ground])
    text = channels(theme["text"])
    chip = mixed(text, below, 0.05)  # a chip, a line under the pointer
    for under in (below, chip):
        assert contrast(mixed(text, under, int(found[1]) / 100), under) >= LEAST


@pytest.mark.parametrize("theme", shell.THEMES.values(), ids=list(shell.THEMES))
def test_links_and_marks_can_be_read(theme: dict[str, str]) -> None:
    below = channels(theme["background"])
    assert contrast(channels(theme["primary"]), below) >= LEAST
