"""Generate `cost.md` and the costs stated in the presets from the newest measurement.

python -m benchmarks && python -m benchmarks --against OLDER_CHECKOUT
python -m benchmarks.around && python -m benchmarks.previews && python -m docs.cost
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from comgra_decl.experiments.plan import HORIZONS, recorded_steps, size_text
from comgra_decl.spec import load_spec
from comgra_decl.spec.loading import PRESET_FOLDER, presets

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("cost.md")
RESULTS = ROOT / "benchmarks" / "results"

NETS = {
    "transformer": "a 12-layer transformer (9.6 M parameters)",
    "mlp": "a 7-layer MLP whose step takes {plain}",
    "tutorial": "the tutorial's recurrent net",
}
"""Descriptions of the benchmark's networks in the comments of the presets."""

TEXT = """\
# What tracing costs

{machine}. Measured on {date} with `python -m benchmarks` ([how](../benchmarks/README.md), [all
figures](../benchmarks/results/{date}.md)). `python -m docs.cost` generates this page from these
figures. Times include storage: they run from the first measured step until all data is on disk.

## A recorded step

The table compares the time of a step recorded with each preset with the time of the same step
without tracing. The last column is the disk space of one record.

{steps}

Between recorded steps, only a counter is attached. Such a step takes {idle} times as long as an
untraced step. For comparison, two measurements of untraced steps differ by {noise}.

Each run also has two fixed costs: the time to discover the model in the first recorded step
({first}), and the disk space of the folder before the first record ({fixed}).

## Compared with an earlier version

{compared}

{around}{previews}## Over a whole training run

Presets either record every step at first and fewer steps later, or record only occasional steps.
The total cost is:

{trainings}

The share is the additional time of all records, as measured above, divided by the time of the
untraced steps. Recorded evaluations are not included. Use `schedule.budget` to limit both time and
disk space.

## Pictures of a probe

{probed}

## Before you train

`comgra-decl plan train.py` measures the same costs for your model on your machine: it runs seven
steps and stops. See the [reference](reference.md#comgra-decl-plan).

## On a GPU

The current version has not been measured on a GPU. `python -m benchmarks --device cuda` measures
every figure that has a target below, within eight minutes
([how](../benchmarks/README.md#on-a-device)). The following figures are for **an earlier version**,
which reduced each tensor in float64 with a dozen kernels. They were measured on one H100 80GB with
torch 2.11.

| training | plain step | idle | outputs and gradients | `light` | `debug` |
| --- | ---: | ---: | ---: | ---: | ---: |
| GPT-2 124M, bf16, batch 8 x 1024 tokens | 41 to 54 ms | 1.0 | 9.2 to 10.1 | 5.9 | 11.5 to 13 |
| GPT-2 350M, the same | 84 to 91 ms | 1.0 | 10.4 | 6 to 7 | 13 to 14 |
| GPT 12x256, float32, batch 4 x 64 tokens | 35 to 40 ms | 1.0 | 4.7 to 5.0 | 3.0 | 6.8 to 7.6 |
| MLP of 6 layers, width 64 | 5.6 to 5.8 ms | 1.0 | 2.9 to 3.1 | 2.2 to 2.5 | 3.9 |
| GPT-2 124M under `torch.compile` | 24 ms | 1.0 | 14.5 to 15.2 | | |

All columns except the plain step show the ratio to the plain step, with every step recorded.
"Gradients" means the gradients of outputs and parameters. Training was bit-identical, no operation
waited for the device, and peak memory was the same to within 0.1%. In a separate test, an output of
1e9 elements in 16 million samples raised peak memory from 7.7 to 13.5 GiB.

| figure | earlier version | target | current version |
| --- | ---: | ---: | --- |
| GPT-2 124M and 350M: outputs and gradients | 9.2 to 10.4 | 1.15 | not measured |
| `light` and `debug`, the same nets | 6 and 13 | 1.10 and 1.6 | not measured |
| GPT 12x256 | 4.7 to 5.0 | 1.35 | not measured |
| MLP 6x64 | 2.9 | 1.8 | not measured |
| compiled GPT-2 124M, recorded with `compile: observed` | 15 | 1.35 | not measured |
| eight raw sums compared with `x.sum()`, device time | 13 to 125 | 1.3 float32, 1.8 bf16 \
| not measured |
| additional kernels in a recorded step of 4 layers (194 without tracing) | 2,010 | 150 \
| not measured |
| compiling the observed variant, compared with the plain graph | 1.0 (prototype) | 1.1 \
| not measured |
| peak memory | up to +75% | +2% or 64 MB | not measured |
| peak memory of the compiled variant | +0.55 GiB (prototype) | +5% | not measured |
| `budget: {{time: "3%"}}`, in a loop that reads the loss | 3.0% | 2 to 4% | only simulated |
| the same, in a loop that never waits for the device | 15% | 2 to 4% | only simulated |

The report of a run states the cost of its records, as measured with the clocks of the host and the
device ([budgets](schedule.md#budgets)).

| device | how tensors are reduced |
| --- | --- |
| CUDA, ROCm; both with Triton | Triton kernels read each number once, without waiting |
| CUDA and ROCm without Triton, XPU | torch operations on blocks of 4 million elements, without \
waiting |
| MPS | the same operations in float32; each record waits for the device once; see below |
| others | each tensor is copied to the host |

All rows were tested only with the CPU in place of the device. The kernels were tested with Triton's
interpreter. Without Triton, torch runs 13 operations for a block of float32 numbers, 14 for bf16
and float16, 15 or 16 on devices without float64, and about 20 for float64 and wide integers. On
devices without float64, tensors of float64 and of integers with 32 bits or more are copied to the
host.

The device memory that a record needs is limited. Results are transferred in parts of 8 MiB, at most
16 MiB of small tensors are kept until they are read, and the tables of tensors to read take 8 MiB.
Statistics are computed for at most 262,144 samples at a time. If a tensor has more than 131,072
samples, only the statistics of its first 4,096 samples are kept individually. Together with the
smaller copies described below, this takes at most 64 MiB.

Some tensors must be copied before they are read:

- tensors whose samples are not contiguous in memory: strided slices, expanded tensors, and tensors
  whose first dimension is not the batch dimension
- complex tensors, which are copied as magnitudes
- tensors of dtypes that the kernels cannot read: float8, and unsigned integers of 16 bits or more

Copies of more than 16 MiB are made in parts of a million elements, and each part is freed before
the next is copied. These parts are read by torch operations instead of the kernels. Smaller copies
take at most 16 MiB at a time. `update` keeps a copy of each parameter during the optimizer step,
when the activations have already been freed.

The rows for `compile: observed` require torch 2.13. With older versions, the benchmark reports this
requirement and measures only idle compiled steps.

On CUDA, a tensor that appears again in a step (same memory, version, shape and strides) is read
only once. The first record that contains the repetition still reads the tensor both times. Later
records reuse the result if the two readings were identical.

## Expensive options

- `values: true` stores whole tensors. `values.max_elements` limits the size of each.
- `preview` keeps up to 4 kB of each tensor, by default in every 50th record. A record with previews
  took 1.15 times as long as one without (in thread time) for an MLP with 7 layers, 1.08 times as
  long for a CNN with 6 convolutions, and 1.07 times as long for a transformer with 6 layers.
  Averaged over 50 records, the ratios are 1.003, 1.002 and 1.001 (one CPU thread).
  From about 50 records on, a run with previews is at most twice as large; a run of a single record
  was 2.1 times as large. `preview: false` disables previews.
- `keep` captures every step. Apart from storage, this costs as much as recording every step.
- Statistics that read a tensor again (quantiles, singular values, custom functions) take additional
  time for each tensor in each record.
- `graph: true` tracks every operation in some recorded steps: the first two, those that take a new
  execution path, and every tenth.
- Under `torch.compile`, recorded steps run eagerly by default. With `compile: observed`, they run
  as a second compiled variant, which is compiled in the first step that needs it.
"""


def main() -> None:
    """Write `cost.md` and the cost comments of the presets."""
    figures = newest()
    others = newest_comparison(), newest_counts(), newest_probes(), newest_around()
    PAGE.write_text(page(figures, *others, newest_previews()))
    for name, path in presets().items():
        path.write_text(priced(path.read_text(), price(figures, name)))
    sys.stdout.write(f"wrote {PAGE} and the costs in {PRESET_FOLDER}\n")


def newest() -> dict[str, Any]:
    """Return the figures from the newest benchmark."""
    files = sorted(RESULTS.glob("[0-9]*-[0-9]*-[0-9]*.json"))
    content: dict[str, Any] = json.loads(files[-1].read_text())
    return content


def newest_comparison() -> dict[str, Any]:
    """Return the newest comparison with an older checkout."""
    files = sorted(RESULTS.glob("against-*.json"))
    content: dict[str, Any] = json.loads(files[-1].read_text())
    return content


def newest_counts() -> dict[str, Any]:
    """Return the newest counts of instructions; empty if there are none."""
    files = sorted(RESULTS.glob("instructions-*.json"))
    return json.loads(files[-1].read_text()) if files else {}


def newest_probes() -> dict[str, Any]:
    """Return the newest costs of probes; empty if there are none."""
    files = sorted(RESULTS.glob("probes-*.json"))
    return json.loads(files[-1].read_text()) if files else {}


def newest_around() -> dict[str, Any]:
    """Return the newest prices of what is recorded around the network; empty if there are none."""
    files = sorted(RESULTS.glob("around-*.json"))
    return json.loads(files[-1].read_text()) if files else {}


def newest_previews() -> dict[str, Any]:
    """Return the newest prices of previews; empty if there are none."""
    files = sorted(RESULTS.glob("previews-*.json"))
    return json.loads(files[-1].read_text()) if files else {}


def page(
    figures: dict[str, Any],
    comparison: dict[str, Any],
    counts: dict[str, Any],
    probes: dict[str, Any],
    around: dict[str, Any],
    previews: dict[str, Any] | None = None,
) -> str:
    """Return `cost.md` for a benchmark, a comparison, counts, and what probes and the rest cost."""
    nets = _nets(figures)
    idle = [f"{_ratio(net, 'idle', 'step'):.2f}" for net in nets.values()]
    noise = max(abs(_ratio(net, "again", "step") - 1) for net in nets.values())
    first = max(net["tools"]["debug"]["seconds"]["first"] for net in nets.values())
    fixed = max(net["tools"]["debug"]["size"]["fixed"] for net in nets.values())
    return TEXT.format(
        machine=_machine(figures["machine"]),
        date=figures["date"],
        steps=_steps(nets),
        idle=" to ".join(sorted({min(idle), max(idle)})),
        noise=f"{noise:.1%}",
        first=f"at most {first:.1f} s",
        fixed=f"at most {size_text(fixed)}",
        compared="\n\n".join(part for part in (_compared(comparison), _counted(counts)) if part),
        around=_around(around),
        previews=_previews(previews or {}),
        trainings=_trainings(nets),
        probed=_probed(probes),
    )


def price(figures: dict[str, Any], preset: str) -> list[str]:
    """Return the comment lines that state a preset's cost; empty if it was not measured."""
    nets = _nets(figures)
    measured = [
        f"{_ratio(net, preset, 'stored'):.2f} times a plain step and {_disk(net, preset)} "
        f"for {NETS[name].format(plain=_milliseconds(net, 'nothing'))}"
        for name in ("transformer", "mlp")
        if (net := nets.get(name)) is not None and preset in net["tools"]
    ]
    if not measured:
        return []
    idle = max(_ratio(net, "idle", "step") for net in nets.values())
    text = (
        f"Cost of a recorded step on one CPU thread: {'; '.join(measured)}. "
        f"Between recorded steps: at most {idle:.2f} times a plain step."
    )
    return _wrapped(text)


def priced(content: str, comment: list[str]) -> str:
    """Return a preset's text with its cost comment replaced; unchanged if `comment` is empty."""
    if not comment:
        return content
    without = re.sub(r"# Cost of a recorded step.*\n(?:# .*\n)*", "", content)
    first = re.compile(r"^[^#\n]", re.MULTILINE)  # the first line that is not a comment
    return first.sub(lambda found: "\n".join([*comment, found[0]]), without, count=1)


def _wrapped(text: str, width: int = 100) -> list[str]:
    lines = ["#"]
    for word in text.split():
        if len(lines[-1]) + 1 + len(word) > width:
            lines.append("#")
        lines[-1] += f" {word}"
    return lines


def _nets(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {net["name"]: net for net in figures["scenarios"]}


def _machine(machine: dict[str, Any]) -> str:
    threads = machine["torch_threads"]
    packages = machine["packages"]
    return (
        f"{machine['processor']}, {machine['cores']} cores, {threads} thread, "
        f"Python {machine['python']}, torch {packages['torch']}"
    )


_PROBED = "[pictures](pictures.md#presets) at every tenth record, and all of "
_UNMEASURED = {
    "off": "attaches nothing",
    "language": f"{_PROBED}`attention`",
    "vision": f"{_PROBED}`debug`",
}
"""What the table says about presets without a measurement of their own."""


def _steps(nets: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| preset | net | plain step | recorded step | ratio | on disk |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for preset in presets():
        measured = [net for net in nets.values() if preset in net["tools"]]
        for net in measured:
            plain, recorded = _milliseconds(net, "nothing"), _milliseconds(net, preset)
            lines.append(
                f"| `{preset}` | {net['name']} | {plain} | {recorded} | "
                f"{_times(net, preset).removeprefix('x')} | {_disk(net, preset)} |"
            )
        if not measured:
            lines.append(f"| `{preset}` | {_UNMEASURED.get(preset, 'not measured')} | | | | |")
    return "\n".join(lines)


def _compared(comparison: dict[str, Any]) -> str:
    """Return the section on an older checkout and this one; ratios above 1 mean slower."""
    load, rounds = comparison["machine"]["load_before"], comparison["rounds"]
    lines = [
        "| tool | net | earlier | now | ratio (quartiles) | processor time |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for one in comparison["comparisons"]:
        step, (before, now) = one["step"], one["steps"]
        lines.append(
            f"| `{one['tool']}` | {one['net']} | {1000 * before:.3g} ms | {1000 * now:.3g} ms | "
            f"{step['value']:.2f} ({step['low']:.2f} to {step['high']:.2f}) | "
            f"{one['cpu']['value']:.2f} |"
        )
    text = (
        "The table compares the time of a step recorded by commit "
        f"{comparison['older'] or 'unknown'} and by this version. Blocks of the two versions "
        f"alternate, and the figures are medians of {rounds} rounds. They were measured on "
        f"{comparison['date']} with `python -m benchmarks --against`, with a load of {load:g} at "
        "the start. `nothing` is plain training, so its ratio shows the noise. `record` captures "
        "outputs and gradients without rules. The times depend on the machine's load and "
        "frequency and therefore differ from those in the tables above: only the ratios can be "
        "compared."
    )
    return "\n".join([*textwrap.wrap(text, 100, break_on_hyphens=False), "", *lines])


def _section(title: str, text: str, lines: list[str]) -> str:
    wrapped = textwrap.wrap(text, 100, break_on_hyphens=False)
    return "\n".join([f"## {title}", "", *wrapped, "", *lines, "", ""])


def _around(prices: dict[str, Any]) -> str:
    """Return the section on what is recorded around the network; empty without prices."""
    if not prices:
        return ""
    load, rounds = prices["machine"]["load_before"], prices["rounds"]
    text = (
        "The price of [what a run records around the network](around.md): automatic metrics, the "
        "watch for stalled steps and growing memory, the steps in which time or memory is "
        f"measured, and the post-mortem of an error. Measured on {prices['date']} with `python -m "
        f"benchmarks.around`, in alternating blocks, with a load of {load:g} at the start; medians "
        f"of {rounds} rounds, compared with plain steps."
    )
    lines = ["| | net | step | ratio (quartiles) |", "| --- | --- | ---: | ---: |"]
    for price in prices["prices"]:
        ratio = price["ratio"]
        lines.append(
            f"| {price['label']} | {price['net']} | {1000 * price['step']:.3g} ms | "
            f"{ratio['value']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) |"
        )
    for net, seconds in prices["post_mortem"].items():
        lines.append(f"| the post-mortem of an error | {net} | {1000 * seconds:.3g} ms, once | |")
    return _section("Around the network", text, lines)


def _previews(prices: dict[str, Any]) -> str:
    """Return the section on previews; empty without prices."""
    if not prices:
        return ""
    text = (
        "The price of the small previews that are kept of tensors recorded without their values "
        "(`preview` in the [spec](reference.md)), for runs that record the outputs and gradients "
        f"of every module at every step. Measured on {prices['date']} with `python -m "
        "benchmarks.previews`, in alternating blocks, with a load of "
        f"{prices['machine']['load_before']:g} at the start; medians of {prices['rounds']} rounds, "
        "compared with the same records without previews. Bytes are those of all files of 100 "
        "records."
    )
    lines = [
        "| previews | net | recorded step | ratio (quartiles) | processor time | bytes | ratio |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for price in prices["prices"]:
        ratio = price["ratio"]
        lines.append(
            f"| {price['label']} | {price['net']} | {1000 * price['step']:.3g} ms | "
            f"{ratio['value']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) | "
            f"{price['cpu']['value']:.2f} | {price['bytes']:,.0f} | {price['grown']:.2f} |"
        )
    return _section("Previews", text, lines)


def _counted(counts: dict[str, Any]) -> str:
    if not counts:
        return ""
    text = (
        "On a machine that other programs share, durations vary too much to show small "
        "differences. The next table therefore compares the number of instructions that a step "
        f"executes, in thousands, counted on {counts['date']} with `python -m "
        f"benchmarks.instructions` for commit {counts['older'] or 'unknown'} and this version. "
        "The other threads write and evaluate records; they run while the training thread "
        "computes outside the interpreter, if there is a second core. Repeated counts of the "
        "training thread agree within 2% (`debug`: 6%), those of the other threads only within a "
        "third."
    )
    lines = [
        "| tool | net | training thread, earlier | now | ratio | all threads, ratio |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for each in counts["counted"]:
        older, this = each["older"], each["this"]
        whole = sum(this.values()) / sum(older.values())
        lines.append(
            f"| `{each['tool']}` | {each['net']} | {older['training'] / 1000:,.0f} "
            f"| {this['training'] / 1000:,.0f} | {this['training'] / older['training']:.2f} "
            f"| {whole:.2f} |"
        )
    return "\n".join([*textwrap.wrap(text, 100, break_on_hyphens=False), "", *lines])


def _trainings(nets: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| preset | net | steps | records | disk | share of time |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for preset in presets():
        spec = load_spec(preset)
        for net in nets.values():
            if preset not in net["tools"]:
                continue
            size = net["tools"][preset]["size"]
            added = _ratio(net, preset, "stored") - 1
            for steps in HORIZONS:
                records = recorded_steps(spec, steps)
                disk = size_text(size["fixed"] + records * size["per_step"])
                share = f"{records * added / steps:.2%}"
                lines.append(
                    f"| `{preset}` | {net['name']} | {steps:,} | {records:,} | {disk} | {share} |"
                )
    return "\n".join(lines)


def _probed(probes: dict[str, Any]) -> str:
    """Return what pictures of a probe cost, relative to the passes that they state."""
    intro = (
        "A probe takes one forward pass of its samples, and each picture the passes that [its "
        "method](pictures.md#methods) states. `python -m benchmarks.probes --save` compares the "
        "time of each picture of 8 samples with that of its passes, and measures the share of the "
        "time that a probe takes, steps without a probe, and memory."
    )
    paragraphs = [intro]
    if "passes" in probes:
        paragraphs.append(
            f"The figures were measured on {probes['date']}. Times are those of the training "
            "thread. The ratio may be below 1, because a picture computes no gradients of "
            "parameters."
            " A second backward pass goes through the forward and the backward pass; it is a "
            "product of the Hessian and a vector, and is timed by itself."
        )
    if "memory" in probes:
        first, last = probes["memory"][0], probes["memory"][-1]
        paragraphs.append(
            f"With every picture of a small net in each record, the process took "
            f"{first['mb']:.0f} MB after {first['records']:,} records and {last['mb']:.0f} MB "
            f"after {last['records']:,}."
        )
    if "between" in probes:
        traced, declared = (probes["between"][key] for key in ("traced", "declared"))
        paragraphs.append(
            f"A step without a record takes {declared:.2f} times as long as an untraced one if a "
            f"probe is declared but not due, and {traced:.2f} times without a probe; untraced "
            f"steps measured again differ by {abs(probes['between']['again'] - 1):.1%}."
        )
    text = "\n\n".join(textwrap.fill(each, 100, break_on_hyphens=False) for each in paragraphs)
    tables = []
    if "passes" in probes:
        tables += [
            "| picture | forward | backward | second backward | its passes | the picture | ratio |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
    for row in probes.get("passes", ()):
        times = (f"{1000 * row[key]:.3g} ms" for key in ("expected", "taken"))
        tables.append(
            f"| `{row['method']}` | {row['forward']} | {row['backward']} | "
            f"{row['second']} | {' | '.join(times)} | {row['ratio']:.2f} |"
        )
    if "budget" in probes:
        tables += [
            "",
            "| probe at every tenth record | budget | records | share of the time |",
            "| --- | ---: | ---: | ---: |",
        ]
    for row in probes.get("budget", ()):
        tables.append(
            f"| `{row['picture']}` of {row['net']} | {row['budget'] or 'none'} | "
            f"{row['records']} | {row['share']:.1%} |"
        )
    return "\n".join([text, *([""] if tables else []), *tables])


def _ratio(net: dict[str, Any], tool: str, span: str) -> float:
    return float(net["tools"][tool]["ratios"][span]["value"])


def _milliseconds(net: dict[str, Any], tool: str) -> str:
    return f"{1000 * net['tools'][tool]['seconds']['stored']:.3g} ms"


def _times(net: dict[str, Any], tool: str) -> str:
    return f"x{_ratio(net, tool, 'stored'):.2f}"


def _disk(net: dict[str, Any], tool: str) -> str:
    return size_text(net["tools"][tool]["size"]["per_step"])


if __name__ == "__main__":
    main()
