"""python play.py [--of FOLDER] OUT [CASE ...]: traces programs and stores their findings."""

from __future__ import annotations

import argparse
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


def play(cases: Path, name: str) -> dict[str, Any]:
    """Run a program in an empty folder; return its output and the findings of each run."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COMGRA": "debug"}
        program = subprocess.run(
            [sys.executable, str(cases / f"{name}.py")],
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", type=Path, default=HERE, help="a folder that contains cases/")
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    cases, out = options.of.resolve() / "cases", options.out
    results = []
    for name in options.names or sorted(path.stem for path in cases.glob("*.py")):
        results.append(play(cases, name))
        out.write_text(json.dumps(results, indent=1) + "\n")
        rules = [f["rule"] for run in results[-1]["runs"] for f in run["findings"]]
        print(name, results[-1]["status"], rules, flush=True)


if __name__ == "__main__":
    main()
