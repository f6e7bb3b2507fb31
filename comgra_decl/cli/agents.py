"""What agents may ask about runs: short answers as JSON, over MCP or from Python."""

from __future__ import annotations

import functools
import inspect
import io
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl import __version__
from comgra_decl.cli.describe import plain
from comgra_decl.errors import ComgraError, PlanError, UnknownNameError, did_you_mean, shown
from comgra_decl.sinks.naming import TRAIN

if TYPE_CHECKING:
    import pandas as pd

    from comgra_decl.query import Run, RunSummary
    from comgra_decl.store.location import Location

LIMIT = 8000
"""Largest number of characters of an answer."""

SERIES_LIMIT = 2000
"""Largest number of characters of a series."""

PICTURE_SIDE = 768
"""Largest width and height of a picture in pixels."""

PICTURE_BYTES = 250_000
"""Largest size of a picture as PNG."""

_PLAN_SECONDS = 600
_LAST_LINES = 12  # of standard error that are shown

_POINTS = 36
_ROWS = 40
_FEW = 5


class Agent:
    """Answer questions about the runs below a folder; reads nothing outside it.

    Each answer is JSON of limited length. "run" is "group/name", "name", or empty for the newest.
    If several runs have the same group and name, it is the path below the folder.

    Args:
        root: the folder.
        allow_plan: whether agents may run training scripts for a few steps, to plan what to record.
    """

    def __init__(self, root: Location, *, allow_plan: bool = False) -> None:
        self._root = root
        self._allow_plan = allow_plan

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """The questions; their docstrings describe them to agents."""
        return [
            self.list_runs,
            self.open_run,
            self.findings,
            self.explain,
            self.series,
            self.row,
            self.compare,
            *([self.plan] if self._allow_plan else []),
        ]

    def list_runs(self) -> str:
        """List the newest runs, with state, number of records and last step."""
        from comgra_decl.query import list_runs

        runs = list_runs(self._root)
        names = self._names(runs)
        rows = [
            {
                "run": names[str(each.path)],
                "state": each.state,
                "records": each.records,
                "last_step": each.last_step,
            }
            for each in reversed(runs[-_ROWS:])
        ]
        return _told({"runs": len(runs), "newest": rows})

    def open_run(self, run: str = "") -> str:
        """Describe a run: state, steps, types, statistics, metrics, nodes, pictures."""
        label, found = self._found(run)
        last = found.kpis(automatic=True).drop_duplicates(["name", "type"], keep="last")
        slots = found.slots
        classes = slots.groupby("node", sort=False)["module_class"].first()
        nodes = [f"{name} ({kind})" if kind else str(name) for name, kind in classes.items()]
        return _told(
            {
                "run": label,
                "state": found.state,
                "error": found.error,
                "records": len(found.records),
                "steps": _sparse(found.steps.tolist()),
                "types": found.types,
                "statistics": found.statistics,
                "passes": list(dict.fromkeys(slots["pass"])),
                "metrics": {
                    f"{name}" if type_ == TRAIN else f"{name} ({type_})": _number(value)
                    for name, type_, value in last[["name", "type", "value"]].itertuples(
                        index=False
                    )
                },
                "pictures": found.pictures,
                "nodes": nodes,
            }
        )

    def findings(self, run: str = "") -> str:
        """Return what the rules found wrong: severity, tensor, step, message, advice."""
        from comgra_decl.rules import diagnose

        found = diagnose(self._run(run)).findings
        rows = [
            {
                "rule": each.rule,
                "severity": str(each.severity),
                "tensor": None if each.place is None else str(each.place),
                "first_step": each.first_step,
                "message": each.message,
                "advice": each.advice,
                "because": each.because,
            }
            for each in found
        ]
        return _told({"count": len(rows), "findings": rows})

    def explain(self, run: str = "") -> str:
        """Return a page of Markdown: facts, verdict, findings with evidence, and the error."""
        from comgra_decl.cli.explaining import explained
        from comgra_decl.rules import diagnose

        found = self._run(run)
        text = explained(found, diagnose(found))
        return text if len(text) <= LIMIT else text[: LIMIT - 30] + "\n(the rest is left out)\n"

    def series(
        self,
        node: str,
        statistic: str = "std",
        run: str = "",
        role: str = "output",
        of: str = "forward",
        type: str = "",  # noqa: A002  (as the column is called)
    ) -> str:
        """Return a statistic of a tensor by step, or of a metric if node is "metrics".

        `of` is the pass: forward, grad, update; `type` the type of execution: train, eval. Long
        series are thinned to the smallest and largest value of each stretch.
        """
        found = self._run(run)
        if node == "metrics":
            values = _metric(found, statistic, type)
        else:
            slot = found.slot(node, role=role, of=of)
            values = slot.series(statistic, type=type or None)
            if values.isna().all() and slot.series("nonfinite", type=type or None).isna().all():
                raise UnknownNameError(
                    f"{node} {role}, pass {of}, was not recorded at any step"
                    + (f" of type {shown(type)}." if type else ".")
                )
        steps, numbers = values.index.to_numpy(np.int64), values.to_numpy(np.float64)
        kept = _extremes(numbers.astype(np.float64, copy=False), _POINTS)
        told = {
            "steps": steps[kept].tolist(),
            "values": [_number(value) for value in numbers[kept].tolist()],
            "length": len(numbers),
        }
        text = json.dumps(told)
        assert len(text) <= SERIES_LIMIT
        return text

    def row(self, step: int, run: str = "", nodes: str = "**") -> str:
        """Return mean, std and largest magnitude of all tensors at a recorded step.

        `nodes` is a pattern such as blocks.0.**.
        """
        from comgra_decl.spec.globs import matches

        table = self._run(run).row(step)
        names = [n for n in ("mean", "std", "abs_max", "nonfinite") if n in table.columns]
        rows = [
            {
                "tensor": f"{node} {role}" + f"[{iteration}]" * (iteration > 0),
                "pass": pass_,
                **{name: _number(float(value)) for name, value in zip(names, line, strict=True)},
            }
            for (node, role, iteration, pass_), line in zip(
                table.index, table[names].to_numpy(), strict=True
            )
            if matches(nodes, node)
        ]
        return _told({"step": step, "count": len(rows), "tensors": rows})

    def compare(self, run: str, other: str) -> str:
        """Find the first step and tensor at which two runs differ."""
        from comgra_decl.query import part, sentences

        found = part(self._run(run), self._run(other))
        return _told({"same_until": found.same_until, "found": sentences(found)})

    def picture(self, name: str, run: str = "", step: int = -1, node: str = "") -> bytes:
        """Return a picture of the run as PNG; open_run lists the names; step -1 is the last."""
        from comgra_decl.pictures.tiles import tiled

        found = self._run(run).picture(name, None if step < 0 else step, node or None)
        values = np.asarray(found.values, np.float64)
        if values.ndim < 2:
            values = values.reshape(1, -1)
        return _png(tiled(values))

    def plan(self, script: str, spec: str = "debug", overrides: str = "") -> str:
        """Run a training script for at most seven steps; return what a spec would record.

        `script` is a path with arguments, as in a shell; `spec` a preset or a YAML file;
        `overrides` are separated by spaces, such as "schedule.every=10 samples.count=4".
        """
        words = ["plan", "--json", "--spec", spec, *shlex.split(overrides), *shlex.split(script)]
        code = "import sys; from comgra_decl.cli.main import main; main(sys.argv[1:])"
        try:
            ended = subprocess.run(
                [sys.executable, "-c", code, *words],
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=_PLAN_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PlanError(f"the script did not end within {_PLAN_SECONDS} seconds") from None
        try:
            return _told(json.loads(ended.stdout))
        except ValueError:
            lines = [line for line in ended.stderr.splitlines() if line.strip()]
            told = "\n".join(lines[-_LAST_LINES:])
            raise PlanError(f"the script ended with code {ended.returncode}:\n{told}") from None

    def _names(self, runs: Sequence[RunSummary]) -> dict[str, str]:
        """Return the name of each run by its path: group and run, or more if several share it."""
        short = {str(each.path): f"{each.group}/{each.name}" for each in runs}
        often = Counter(short.values())
        above = f"{self._root}".rstrip("/") + "/"
        return {
            path: path.removeprefix(above) if often[label] > 1 else label
            for path, label in short.items()
        }

    def _run(self, name: str) -> Run:
        from comgra_decl.query import open_run

        return self._found(name)[1] if name else open_run(self._root)

    def _found(self, name: str) -> tuple[str, Run]:
        """Return a run with its name."""
        from comgra_decl.query import list_runs, open_run

        runs = list_runs(self._root)
        names = self._names(runs)
        if not name:
            newest = open_run(self._root)
            return names.get(str(newest.path), f"{newest.group}/{newest.name}"), newest
        known = [names[str(each.path)] for each in runs]
        meant = [each for each in runs if names[str(each.path)] == name]
        meant = meant or [each for each in runs if each.name == name]
        if meant:
            return names[str(meant[-1].path)], open_run(meant[-1].path)
        same = [label for label in known if label.endswith(f"/{name}")]
        if same:
            raise UnknownNameError(f"{shown(name)} is several runs: {', '.join(same[:_FEW])}.")
        raise UnknownNameError(
            f"there is no run {shown(name)}{did_you_mean(name, known) or '.'} "
            f"The newest is {known[-1] if known else 'missing: the folder has no runs'}."
        )


def server(root: Path, *, allow_plan: bool = False) -> Any:
    """Return an MCP server for the runs below a folder.

    Args:
        root: the folder.
        allow_plan: whether the server has the tool `plan`, which runs training scripts.

    Raises:
        MissingPackageError: the MCP SDK is not installed.
    """
    from comgra_decl.errors import needed

    needed("pandas", "mcp")  # whose extra includes `read`
    from comgra_decl.query import location, require_folder

    require_folder(location(root))
    module = needed("mcp.server.mcpserver", "mcp")
    agent = Agent(location(root), allow_plan=allow_plan)
    tools: dict[str, Callable[..., Any]] = {}
    error = needed("mcp.server.mcpserver.exceptions", "mcp").ToolError

    class Server(module.MCPServer):  # type: ignore[name-defined,misc]
        """Answers calls with wrong arguments in a sentence; the SDK quotes its validator."""

        async def call_tool(self, name: str, arguments: dict[str, Any], *rest: Any) -> Any:
            problem = wrong_arguments(tools[name], arguments or {}) if name in tools else None
            if problem is not None:
                raise error(problem)
            return await super().call_tool(name, arguments, *rest)

    built = Server(
        "comgra_decl",
        version=__version__,
        instructions="Recorded training runs: what happened inside a network, and what went wrong. "
        "Begin with list_runs and findings.",
    )
    for tool in agent.tools:
        tools[tool.__name__] = tool
        built.tool()(_telling(tool, error))

    def picture(name: str, run: str = "", step: int = -1, node: str = "") -> Any:
        return module.Image(data=agent.picture(name, run, step, node), format="png")

    picture.__doc__ = agent.picture.__doc__
    tools["picture"] = picture
    built.tool(structured_output=False)(_telling(picture, error))
    return built


def wrong_arguments(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the arguments of a call, and what is valid; None if nothing is."""
    known = inspect.signature(tool).parameters
    required = [name for name, each in known.items() if each.default is each.empty]
    problems = [
        f"there is no argument {shown(name)}{did_you_mean(name, [*known]) or '.'}"
        for name in arguments
        if name not in known
    ]
    problems += [f"{name} is missing." for name in required if name not in arguments]
    for name, value in arguments.items():
        wanted = str(known[name].annotation) if name in known else ""  # annotations are texts
        if wanted == "int" and not _is_integer(value):
            problems.append(f"{name} must be an integer, got {shown(value)}.")
        elif wanted == "str" and not isinstance(value, str):
            problems.append(f"{name} must be a text, got {shown(value)}.")
    if not problems:
        return None
    valid = ", ".join(f"{name} (required)" if name in required else name for name in known)
    what = " ".join(str(tool.__doc__).split())
    return f"{' '.join(problems)} Arguments: {valid or 'none'}. {tool.__name__}: {what}"


def _is_integer(value: object) -> bool:
    if isinstance(value, str):  # as the SDK accepts it
        return re.fullmatch(r"[+-]?\d+", value.strip()) is not None
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value)


def _telling(tool: Callable[..., Any], error: type[Exception]) -> Callable[..., Any]:
    """Return a tool whose errors reach the agent in full: the SDK hides those it does not know."""

    @functools.wraps(tool)
    def told(*arguments: Any, **named: Any) -> Any:
        try:
            return tool(*arguments, **named)
        except ComgraError as wrong:
            raise error(str(wrong)) from None

    return told


def _metric(run: Run, name: str, type_: str) -> pd.Series[float]:
    """Return the values of a metric by step; without a type, those of training if there are any."""
    table = run.kpis(automatic=True)
    known = list(dict.fromkeys(table["name"]))
    if name not in known:
        raise UnknownNameError(
            f"there is no metric {shown(name)}{did_you_mean(name, known) or '.'} "
            f"This run has {', '.join(map(str, known[:_ROWS])) or 'none'}."
        )
    table = table[table["name"] == name]
    types = list(dict.fromkeys(table["type"]))
    wanted = type_ or (TRAIN if TRAIN in types else types[0])
    if wanted not in types:
        raise UnknownNameError(
            f"metric {name!r} has no type {shown(wanted)}{did_you_mean(wanted, types) or '.'} "
            f"It has {', '.join(map(str, types))}."
        )
    return table[table["type"] == wanted].set_index("step")["value"]


def _told(content: dict[str, Any]) -> str:
    """Return content as JSON; its longest list, mapping or text is shortened until all fits."""
    content, left_out = plain(content), dict.fromkeys(content, 0)
    while True:
        counts = {f"{name}_left_out": count for name, count in left_out.items() if count}
        text = json.dumps(content | counts)
        if len(text) <= LIMIT:
            return text
        name = max(content, key=lambda key: len(json.dumps(content[key])))
        whole = content[name]
        kept = len(whole) * 3 // 4
        left_out[name] += len(whole) - kept
        items = [*whole.items()][:kept] if isinstance(whole, dict) else whole[:kept]
        content[name] = dict(items) if isinstance(whole, dict) else items


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """Return an image [height, width, 3] as PNG, reduced until it is within the limits."""
    from comgra_decl.errors import needed

    image = needed("PIL.Image", "mcp").fromarray(pixels)
    image.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    while True:
        file = io.BytesIO()
        image.save(file, "PNG")
        if file.tell() <= PICTURE_BYTES:
            return file.getvalue()
        image = image.reduce(2)


def _sparse(steps: list[int]) -> list[int] | dict[str, int]:
    if len(steps) <= _POINTS:
        return steps
    return {"count": len(steps), "first": steps[0], "last": steps[-1]}


def _extremes(values: np.ndarray[Any, np.dtype[np.float64]], points: int) -> list[int]:
    """Return indices of the smallest and largest value of each of `points` / 2 stretches."""
    if len(values) <= points:
        return [*range(len(values))]
    found: set[int] = set()
    for stretch in np.array_split(np.arange(len(values)), points // 2):
        part = values[stretch]
        wrong = stretch[~np.isfinite(part)]
        if len(wrong):
            found.add(int(wrong[0]))
        if np.isfinite(part).any():
            found |= {int(stretch[np.nanargmin(part)]), int(stretch[np.nanargmax(part)])}
    return sorted(found)


def _number(value: float) -> float | str:
    """Return a number with five digits; NaN and infinity as strings, which JSON lacks."""
    return float(f"{value:.5g}") if np.isfinite(value) else str(value)
