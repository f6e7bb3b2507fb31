"""Each extra, alone in an environment of its own, does what it is for; others say what is missing.

An environment contains links to exactly those packages that the extra requires. Extras whose
packages are not installed here are skipped; `make test-bridges` has those of the trackers and MCP.
"""

from __future__ import annotations

from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

import pytest

from benchmarks.extras import IN_README, declared, required, size_of
from tests.support.programs import TRAINING
from tests.test_packaging import ROOT, Environment, tried
from tests.test_packaging import environment as environment  # which has the wheel
from tests.test_packaging import sdist as sdist
from tests.test_packaging import wheel as wheel

pytestmark = pytest.mark.packaging

RECORD = f"""
import torch
import comgra_decl as comgra
{TRAINING}
spec = {{"nodes": {{"all": {{"select": "**", "capture": ["output"], "values": True}}}}}}
def record(**more):
    with comgra.trace({{**spec, **more}}, root="runs") as session:
        train()
    return session.path
"""

READ = f"{RECORD}\nrun = comgra.open_run(record())\n"
EXPORT = f"{READ}\nfrom comgra_decl.export import export_run\n"

SHADE = """
import holoviews as hv
import numpy as np
from comgra_decl.viewer.plotting import shaded
curve = hv.Curve(np.zeros(200_000))
"""
LOAD = "from comgra_decl.hooks.probing.loading import tensors_in_file\n"

USES = {
    "": f"{RECORD}\nprint(record().exists())",
    "read": f"{READ}\nprint(run.series('0', 'std').size == 12)",
    "view": f"{READ}\nfrom comgra_decl.viewer.plotting import save\n"
    "print(run.view('overview') is not None and save(run.plot.kpis(), 'out.html').exists())",
    "fast": "import torch\nfrom comgra_decl.stats.kernel import kernel_for\n"
    "print(kernel_for(torch.float32) is not None)",
    "lightning": "from comgra_decl.integrations.lightning import TraceCallback\n"
    "print(TraceCallback('debug') is not None)",
    "transformers": "from comgra_decl.integrations import accelerate, transformers\n"
    "print(transformers.TraceCallback('debug') is not None)",
    "parquet": f"{EXPORT}\nimport pyarrow.parquet as pq\n"
    "print(pq.read_table(export_run(run, 'out') / 'records.parquet').num_rows == 12)",
    "queries": f"{READ}\ntable = comgra.open_group(run.path.parent).table()\n"
    "print(table.collect().height > 0)",
    "tensorboard": f"{EXPORT}\nprint(any(export_run(run, 'out', 'tensorboard').glob('events*')))",
    "graphml": f"{EXPORT}\nimport networkx\n"
    "print({*networkx.read_graphml(export_run(run, 'out.graphml', 'graphml')).edges}"
    " >= {*run.edges()})",
    "onnx": f"{EXPORT}\nimport onnx\nmodel = onnx.load(export_run(run, 'out.onnx', 'onnx'))\n"
    "onnx.checker.check_model(model)\nprint(len(model.graph.node) > 0)",
    "mcp": f"{READ}\nfrom pathlib import Path\nfrom comgra_decl.cli.agents import server\n"
    "print(server(Path('runs')).name == 'comgra_decl')",
    "wandb": f"import os; os.environ['WANDB_MODE'] = 'offline'\n{RECORD}\n"
    "print((record(sinks=['wandb']) and any(__import__('pathlib').Path('wandb').iterdir())))",
    "mlflow": f"{RECORD}\nrecord(sinks=[{{'mlflow': {{'uri': 'sqlite:///m.db'}}}}])\n"
    "import mlflow\nclient = mlflow.MlflowClient('sqlite:///m.db')\n"
    "print(len(client.search_experiments()) == 2)",
    "trackio": "import os; os.environ['TRACKIO_DIR'] = 'tracked'\n"
    f"{RECORD}\nrecord(sinks=['trackio'])\nfrom pathlib import Path\n"
    "print(any(Path('tracked').rglob('*.db')))",
    "plot": f"{READ}\nfrom comgra_decl.viewer.plotting import save\nfrom pathlib import Path\n"
    "save(run.plot.kpis(), 'out.svg')\nprint('<svg' in Path('out.svg').read_text())",
    "big": f"{SHADE}\nprint(isinstance(shaded(curve, dynamic=False), hv.RGB))",
    "captum": f"{RECORD}\n"
    "method = {'_target_': 'captum.attr.Saliency'}\n"
    "probes = {'eyes': {'samples': {'count': 2}, 'schedule': {'first': 1}}}\n"
    "print(record(probes=probes, pictures={'s': {'method': method, 'of': 'eyes', 'target': 0}})"
    ".exists())",
    "safetensors": f"{LOAD}\nimport torch\nfrom safetensors.torch import save_file\n"
    "save_file({'w': torch.ones(2)}, 'w.safetensors')\n"
    "print(tensors_in_file('w.safetensors')['w'].sum().item() == 2)",
    "xarray": f"{READ}\nprint(run.to_xarray().sizes['step'] == 12)",
    "projections": f"{READ}\n"
    "print({run.embedding('0', method=name).values.shape for name in ('tsne', 'umap')}"
    " == {(12, 5, 2)})",
}
"""What each extra is for, as a program that prints True."""

MISSING = {
    "read": ("pandas", RECORD + "record()\ncomgra.open_run('runs')"),
    "view": ("panel", READ + "run.view()"),
    "parquet": ("pyarrow", EXPORT + "export_run(run, 'out', 'parquet')"),
    "queries": ("polars", READ + "comgra.open_group(run.path.parent).table()"),
    "tensorboard": ("tensorboard", EXPORT + "export_run(run, 'out', 'tensorboard')"),
    "graphml": ("networkx", EXPORT + "export_run(run, 'out', 'graphml')"),
    "onnx": ("onnx", EXPORT + "export_run(run, 'out', 'onnx')"),
    "mcp": ("mcp", READ + "from pathlib import Path\nfrom comgra_decl.cli.agents import server\n"
            "server(Path('runs'))"),
    "wandb": ("wandb", "from comgra_decl.sinks.wandb import WandbSink; WandbSink()"),
    "mlflow": ("mlflow", "from comgra_decl.sinks.mlflow import MlflowSink; MlflowSink()"),
    "trackio": ("trackio", "from comgra_decl.sinks.trackio import TrackioSink; TrackioSink()"),
    "plot": ("matplotlib", READ + "from comgra_decl.viewer.plotting import save\n"
             "save(run.plot.kpis(), 'out.svg')"),
    "big": ("datashader", SHADE + "shaded(curve)"),
    "safetensors": ("safetensors", LOAD + "tensors_in_file('w.safetensors')"),
    "xarray": ("xarray", READ + "run.to_xarray()"),
    "projections": ("openTSNE", READ + "run.embedding('0', method='tsne')"),
}  # fmt: skip
"""A package of each extra, and a program that needs it."""

NOT_USED = {"all", "bench", "dev", "docs", "examples", "oldest", "peers", "research", "test", "zoo"}
"""Extras that combine others, and those for working on comgra_decl itself."""


def packages(extra: str) -> dict[str, Distribution]:
    try:
        return required(extra)
    except PackageNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")


def test_every_extra_is_tried() -> None:
    assert USES.keys() | NOT_USED == declared().keys()


@pytest.mark.slow
@pytest.mark.parametrize("extra", USES)
def test_an_extra_alone_is_enough(extra: str, environment: Environment, tmp_path: Path) -> None:
    alone = Environment(tmp_path, only=packages(extra))
    alone.link(environment)
    done = tried(alone.python, "-c", USES[extra], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "True", done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("extra", MISSING)
def test_what_is_missing_says_its_extra(
    extra: str, environment: Environment, tmp_path: Path
) -> None:
    package, program = MISSING[extra]
    light = Environment(tmp_path, without=[package.lower()])
    light.link(environment)
    done = tried(light.python, "-c", program, cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert f"pip install 'comgra-decl[{extra}]'" in done.stderr.splitlines()[-1], done.stderr


def test_the_readme_states_how_many_packages_each_extra_adds() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    for extra in IN_README:
        (row,) = [row for row in rows if row and row[0].strip("`") == (extra or "none")]
        packages(extra)
        assert row[2] == str(size_of(extra).packages), extra
