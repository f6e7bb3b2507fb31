"""Run one scenario: probe every tool, plan the blocks, interleave them, and summarize."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.nets import SCENARIOS, Scenario, Training
from benchmarks.results import ScenarioResult, summarise
from benchmarks.sizes import Size, probe
from benchmarks.timing import Meter, interleave, plan_for
from benchmarks.tools import TOOLS, Tool


def selected(
    nets: Sequence[str] | None, tools: Sequence[str] | None
) -> tuple[list[Scenario], list[Tool]]:
    """Return the scenarios and tools with these names (None: all), always with the baseline.

    Raises:
        SystemExit: a name is unknown.
    """
    known = {scenario.name: scenario for scenario in SCENARIOS}
    known_tools = {tool.name: tool for tool in TOOLS}
    for name, names in [(n, known) for n in nets or ()] + [(t, known_tools) for t in tools or ()]:
        if name not in names:
            raise SystemExit(f"{name!r} is none of: {', '.join(names)}")
    wanted = {"nothing", *(known_tools if tools is None else tools)}
    return (
        [s for s in SCENARIOS if nets is None or s.name in nets],
        [t for t in TOOLS if t.name in wanted],
    )


def measure(
    scenario: Scenario, tools: Sequence[Tool], *, root: Path, rounds: int
) -> ScenarioResult:
    """Measure `tools` on `scenario`, creating runs below `root` and removing them afterwards."""
    training = scenario.build()
    left_out = {t.name: why for t in tools if (why := refusal(t, training)) is not None}
    running = [tool for tool in tools if tool.name not in left_out]
    meter = Meter(training, root)
    sizes = {tool.name: _probe(scenario, tool, meter) for tool in running}
    plans = {
        t.name: plan_for(t, step_seconds=sizes[t.name].step, block_seconds=scenario.block_seconds)
        for t in running
    }
    blocks = interleave(meter, plans, tools=running, rounds=rounds)
    return ScenarioResult(
        name=scenario.name,
        description=scenario.description,
        parameters=sum(p.numel() for p in training.model.parameters()),
        rounds=rounds,
        tools={
            t.name: summarise(t.label, blocks[t.name], blocks["nothing"], size=sizes[t.name])
            for t in running
        },
        left_out={t.label: left_out[t.name] for t in tools if t.name in left_out},
    )


def refusal(tool: Tool, training: Training) -> str | None:
    """Return why `tool` cannot run on `training`; None if it can."""
    missing = [name for name in tool.requires if importlib.util.find_spec(name) is None]
    if missing:
        return f"{missing[0]} is not installed"
    return tool.refuses(training)


def _probe(scenario: Scenario, tool: Tool, meter: Meter) -> Size:
    size = probe(tool, meter, records=scenario.records)
    print(f"{scenario.name}: {tool.label}: {size.step * 1000:.2f} ms per step", file=sys.stderr)
    return size
