"""python play.py OUT [CASE ...]: traces programs with COMGRA=debug and stores their findings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 600
FIELDS = ("severity", "rule", "first_step", "after_step", "message", "advice", "because")


def play(name: str) -> dict[str, Any]:
    """Run a program in an empty folder; return its output and the findings of each run."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COMGRA": "debug"}
        program = subprocess.run(
            [sys.executable, str(HERE / "cases" / f"{name}.py")],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        return {
            "name": name,
            "status": program.returncode,
            "output": program.stdout[-300:],
            "runs": [diagnosed(path) for path in sorted(Path(folder).glob("*/*/*"))],
        }


def diagnosed(path: Path) -> dict[str, Any]:
    """Return the number of records in a run and its findings."""
    import comgra_decl as comgra
    from comgra_decl.rules import diagnose

    run = comgra.open_run(path)
    findings = [
        {"place": str(found.place or ""), **{field: getattr(found, field) for field in FIELDS}}
        for found in diagnose(run).findings
    ]
    return {"records": len(run.records), "findings": findings}


def main() -> None:
    """Play the named programs, or all of them."""
    out, *names = sys.argv[1:]
    results = []
    for name in names or sorted(path.stem for path in (HERE / "cases").glob("*.py")):
        results.append(play(name))
        Path(out).write_text(json.dumps(results, indent=1) + "\n")
        rules = [f["rule"] for run in results[-1]["runs"] for f in run["findings"]]
        print(name, results[-1]["status"], rules, flush=True)


if __name__ == "__main__":
    main()
