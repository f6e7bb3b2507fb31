"""python play.py HALF OUT: trains half of the cases with tracing and stores what the rules find."""

import json
import logging
import os
import sys
import tempfile
import warnings
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import cases  # next to this file, which is on the path of a script

HERE = Path(__file__).parent
SECONDS = 240
FIELDS = ("severity", "rule", "first_step", "after_step", "message", "advice", "because")


def chosen(half):
    """Every other buggy and every other healthy case."""
    buggy = {name: known["buggy"] for name, known in json.loads((HERE / "truth.json").read_text()).items()}
    names = sorted(cases.CASES)
    return [
        name
        for kind in (True, False)
        for at, name in enumerate(n for n in names if buggy[n] is kind)
        if at % 2 == half
    ]


def play(name, pipe):
    import comgra_decl as comgra
    from comgra_decl.rules import diagnose

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    error = None
    with tempfile.TemporaryDirectory() as root:
        with comgra.trace("debug", root=root) as session:
            try:
                quality = float(cases.CASES[name](comgra.kpi))
            except Exception as raised:
                quality, error = float("nan"), repr(raised)[:200]
        found = diagnose(comgra.open_run(session.path)).findings if session.path else []
        findings = [{"place": str(f.place or ""), **{k: getattr(f, k) for k in FIELDS}} for f in found]
    pipe.send({"name": name, "quality": quality, "error": error, "findings": findings})


def main():
    half, out = int(sys.argv[1]), Path(sys.argv[2])
    results = []
    for name in chosen(half):
        here, there = get_context("fork").Pipe(duplex=False)
        process = get_context("fork").Process(target=play, args=(name, there))
        process.start()
        try:
            ended = {"name": name, "error": "took too long", "findings": []}
            results.append(here.recv() if here.poll(SECONDS) else ended)
        except EOFError:
            results.append({"name": name, "error": "the process ended", "findings": []})
        process.kill()
        process.join()
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(name, [f["rule"] for f in results[-1]["findings"] if f["because"] is None], flush=True)


if __name__ == "__main__":
    main()
