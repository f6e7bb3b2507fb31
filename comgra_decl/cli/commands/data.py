"""The command `comgra-decl data`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from comgra_decl.errors import Exit

if TYPE_CHECKING:
    from comgra_decl.experiments.data import Drawn
    from comgra_decl.query.batches import Summary

PANEL = "Look"

BATCHES = 4

USAGE = f"""\
usage: comgra-decl data [OPTIONS] [--] SCRIPT [ARGS ...]
       comgra-decl data [OPTIONS] [--] -m MODULE [ARGS ...]

Draws the first batches of a training script, as its model receives them, and prints their shapes,
ranges, channels, duplicates and classes. The script runs unchanged, but its optimizer steps change
nothing, and it is ended before the step that follows the last batch. Its output goes to standard
error.

  --batches N    number of batches; default: {BATCHES}
  --page FILE    write an HTML page, with the images of the first batch
  --mean A,B,C   the mean of each channel that the script subtracts from its images
  --std A,B,C    the standard deviation of each channel by which it divides them
  --json         print JSON of at most 20 kB; "left_out" tells what is missing

Exit codes: 0 batches were drawn; 3 no model was called in training; 2 invalid command line;
otherwise the script's own.
"""


def passed_on(arguments: Sequence[str]) -> None:
    """Show the first batches of a script as its model receives them."""
    from comgra_decl.cli.targets import fault_of_file
    from comgra_decl.cli.watched_script import (
        Enough,
        called,
        number_of,
        options_of,
        refuse,
        run_watched,
    )
    from comgra_decl.doors.script import UsageError
    from comgra_decl.errors import CallError
    from comgra_decl.experiments.data import Drawn, drawing

    rest = [*arguments]
    if rest[:1] in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return
    values = ("--batches", "--page", "--mean", "--std")
    try:
        options = options_of(rest, flags=("--json",), values=values)
        batches = number_of("--batches", options, BATCHES)
        mean, std = (_numbers(name, options) for name in ("--mean", "--std"))
        if len(mean) != len(std):
            raise UsageError("--mean and --std need one number per channel each")
        if any(not each > 0 for each in std):
            raise UsageError(f"--std must be positive, got {options['--std']!r}")
        target = Path(options["--page"]) if "--page" in options else None
        if target is not None:
            if (fault := fault_of_file(target)) is not None:
                raise UsageError(f"--page: {fault}")
            target = target.absolute()  # the script may change the current folder
        call = called(rest)
    except UsageError as error:
        refuse("data", error, USAGE)
    drawn = Drawn()
    run_watched(call, drawing(drawn, batches, Enough))
    _show(drawn, as_json="--json" in options)
    if target is not None and drawn.batches:
        from comgra_decl.experiments.data_page import page

        text = page(drawn, mean=mean, std=std)
        try:
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise CallError(f"cannot write to {str(target)!r}: {error}") from error
    if not drawn.batches:
        sys.exit(Exit.WANTING)


def _numbers(name: str, options: dict[str, str]) -> list[float]:
    from comgra_decl.doors.script import UsageError

    text = options.get(name, "")
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise UsageError(f"{name} must be numbers separated by commas, got {text!r}") from None


def _show(drawn: Drawn, *, as_json: bool) -> None:
    from dataclasses import asdict

    from comgra_decl.cli.printing import print_json
    from comgra_decl.query.batches import summary
    from comgra_decl.terminal import console

    found = [
        summary(label, batches, convolved=label in drawn.convolved)
        for label, batches in drawn.tensors.items()
    ]
    if as_json:
        tensors = [asdict(each) for each in found]
        print_json({"batches": drawn.batches, "target": drawn.target, "tensors": tensors})
        return
    out = console()
    if not found:
        out.print("No model was called in training before the first optimizer step.")
        return
    out.print("1 batch" if drawn.batches == 1 else f"{drawn.batches} batches")
    for each in found:
        out.print("", *_lines(each), sep="\n")
    if not any(label.startswith("target") for label in drawn.tensors):
        out.print(
            "\nWhich tensor is the target is unknown, because no loss function of torch was called "
            "with one. It may be among those that were not passed to the model."
        )


def _lines(found: Summary) -> list[str]:
    shapes = ", ".join("\u00d7".join(map(str, shape)) or "one number" for shape in found.shapes)
    lines = [f"{found.label}: {shapes}, {found.dtype}"]
    if found.mean is not None:
        lines.append(
            f"  range {found.low:.4g} to {found.high:.4g}, mean {found.mean:.4g}, "
            f"std {found.std:.4g}"
        )
    if found.nonfinite:
        values = "1 value is" if found.nonfinite == 1 else f"{found.nonfinite} values are"
        lines.append(f"  {values} NaN or infinite")
    if found.channels and len(found.channels) > 1:
        pairs = ", ".join(f"{mean:.3g} \u00b1 {std:.3g}" for mean, std in found.channels)
        lines.append(f"  channels (mean \u00b1 std): {pairs}")
    if found.repeated or found.shared:
        lines.append(
            f"  samples: {found.samples}; equal to an earlier one of their batch: "
            f"{found.repeated}; equal to one of an earlier batch: {found.shared}"
        )
    if found.classes:
        most = sorted(found.classes.items(), key=lambda item: -item[1])[:12]
        counts = ", ".join(f"{name}: {count}" for name, count in most)
        more = f", and {len(found.classes) - len(most)} more" if len(found.classes) > 12 else ""
        different = (
            "1 value" if len(found.classes) == 1 else f"{len(found.classes)} different values"
        )
        lines.append(f"  {different} ({counts}{more})")
        if found.fewest == 1 and len(found.classes) > 1:
            lines.append("  some batch contains only one of them: the data may not be shuffled")
    return lines
