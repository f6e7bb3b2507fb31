"""The wheel, used from an environment without access to the repository."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution
from pathlib import Path, PurePath

import pytest
import yaml
from packaging.requirements import Requirement

import comgra_decl
from comgra_decl.query import list_runs
from tests.support.programs import HYDRA_DATACLASS, TRAINING, loss_of, plain_loss

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]


def tried(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that must succeed, and return its output."""
    done = tried(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _environment() -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return ours | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def only(pattern: str, folder: Path) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, built from the repository."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    return only("*.tar.gz", folder)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution as an installer would."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = only("comgra_decl-*", folder)
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
    return only("*.whl", folder)


class Environment:
    """A virtual environment with our dependencies, but without comgra_decl and the repository.

    Args:
        folder: where it is created.
        without: packages that are left out.
        only: the packages that it has, by name; None: all that are installed here.
    """

    def __init__(
        self,
        folder: Path,
        *,
        without: Iterable[str] = (),
        only: Mapping[str, Distribution] | None = None,
    ) -> None:
        self.bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / "python"
        run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
        self.packages = Path(self.output("import sysconfig; print(sysconfig.get_path('purelib'))"))
        if only is None:  # also those that a path file adds, as in the environment of the peers
            every = [{e.name: e for e in place.iterdir()} for place in _site_packages()]
        else:
            every = [_entries(only.values())]
        folders = [folder / f"dependencies{number}" for number in range(len(every))]
        for dependencies, chosen in zip(folders, every, strict=True):
            dependencies.mkdir()
            for name, entry in chosen.items():
                if not _is_ours(entry) and _package(entry) not in without:
                    (dependencies / name).parent.mkdir(exist_ok=True)
                    (dependencies / name).symlink_to(entry)
        lines = "".join(f"{dependencies}\n" for dependencies in folders)
        (self.packages / "dependencies.pth").write_text(lines)

    def output(self, code: str, cwd: Path = Path("/")) -> str:
        """Run Python code and return its output."""
        return run(self.python, "-c", code, cwd=cwd).strip()

    def install(self, wheel: Path) -> None:
        """Install a wheel like pip, without its dependencies."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--no-cache-dir", "-q"]
        run(*pip, "install", "--compile", "--no-deps", "--no-index", wheel, cwd=Path("/"))

    def link(self, other: Environment) -> None:
        """Have what another environment has installed, which takes less time than installing it."""
        for name in other.gained():
            (self.packages / name).symlink_to(other.packages / name)

    def gained(self) -> set[str]:
        """Return the names that installing has added to the top level of site-packages."""
        return {entry.name for entry in self.packages.iterdir()} - {"dependencies.pth"}


def _site_packages() -> list[Path]:
    """Return the folders with packages on the path, first that of this environment."""
    others = (path for path in sys.path if Path(path).name == "site-packages")
    return [Path(path) for path in dict.fromkeys([sysconfig.get_path("purelib"), *others])]


def _entries(packages: Iterable[Distribution]) -> dict[str, Path]:
    """Return the files and folders of packages in site-packages, by name.

    Namespace packages such as `google` are shared, so their parts are returned.
    """
    found = {}
    for package in packages:
        for file in package.files or []:
            root, *rest = file.parts
            if root in ("..", "__pycache__"):
                continue
            folder = Path(str(package.locate_file(root)))
            shared = rest and folder.suffix == "" and not (folder / "__init__.py").exists()
            name = "/".join(file.parts[:2]) if shared else root
            found[name] = Path(str(package.locate_file(name)))
    return found


def _is_ours(entry: Path) -> bool:
    return "comgra" in entry.name or entry.name == "hydra_plugins" or entry.suffix == ".pth"


def _package(entry: Path) -> str:
    """Return the package that a file or folder in site-packages belongs to."""
    return entry.name.partition("-")[0].partition(".")[0].lower()


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel installed."""
    environment = Environment(tmp_path_factory.mktemp("environment"))
    environment.install(wheel)
    return environment


def files_of(folder: str, *endings: str) -> set[str]:
    """Return the files of a folder of the repository, relative to that folder."""
    found = (path for path in (ROOT / folder).rglob("*") if path.suffix in endings)
    return {str(path.relative_to(ROOT / folder)) for path in found}


def test_the_wheel_contains_the_whole_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    viewer = files_of("viewer", ".py", ".js", ".css")
    assert any(name.endswith(".js") for name in viewer)
    assert {f"comgra_decl/viewer/{name}" for name in viewer} <= names
    presets = files_of("configs", ".yaml")
    assert "comgra/debug.yaml" in presets
    assert {f"comgra_decl/configs/{name}" for name in presets} <= names
    assert {"comgra_decl/py.typed", "hydra_plugins/comgra_decl_search_path.py"} <= names
    assert not any("__pycache__" in name or name.startswith("tests") for name in names)


@pytest.mark.slow
def test_the_repository_gives_the_same_wheel_as_the_source_distribution(
    wheel: Path, tmp_path: Path
) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT)
    direct = zipfile.ZipFile(only("*.whl", tmp_path))
    assert set(direct.namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_installing_adds_nothing_but_our_packages(environment: Environment) -> None:
    version = environment.output("import comgra_decl; print(comgra_decl.__version__)")
    assert environment.gained() == {
        "comgra_decl",
        "hydra_plugins",
        f"comgra_decl-{version}.dist-info",
    }


def test_the_environment_does_not_see_the_repository(environment: Environment) -> None:
    code = "import sys, comgra_decl, hydra_plugins; print(*hydra_plugins.__path__)\n"
    code += "print(comgra_decl.__file__); print(*sys.path)"
    plugins, package, path = environment.output(code).splitlines()
    assert plugins == str(environment.packages / "hydra_plugins")
    assert Path(package).parent == environment.packages / "comgra_decl"
    assert str(ROOT) not in path.split()


@pytest.fixture(scope="module")
def trained(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training run that was recorded because a variable says so."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "quiet.py").write_text(f"{TRAINING}\ntrain()\n")
    door = f"COMGRA=debug exec {environment.python} quiet.py"
    assert loss_of(run("sh", "-c", door, cwd=folder)) == plain_loss()
    return folder


def recorded(environment: Environment, folder: Path) -> set[tuple[str, str, int]]:
    """Return the group, state and last step of each run in a folder, as the command lists them."""
    runs = json.loads(run(environment.bin / "comgra-decl", "ls", "runs", "--json", cwd=folder))[
        "runs"
    ]
    return {(run["group"], run["state"], run["last_step"]) for run in runs}


@pytest.mark.slow
def test_torch_finds_the_door_in_the_environment(environment: Environment, trained: Path) -> None:
    assert recorded(environment, trained) == {("quiet", "finished", 11)}


def test_hydra_finds_the_door_of_one_word(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(HYDRA_DATACLASS)
    listed = run(environment.python, "app.py", "+comgra=light", "--cfg", "hydra", cwd=tmp_path)
    assert "comgra_decl.doors.hydra.TraceCallback" in listed


OPTIONAL = ("panel", "bokeh", "holoviews", "llvmlite", "pandas", "param", "numba", "mcp")
"""Packages of the extras `read`, `view`, `fast` and `mcp`, and those that need them."""

RESUMED = f"""
import comgra_decl as comgra
{TRAINING}
for resume in ("false", "true"):
    changes = ["run.resume=" + resume, "probes.eyes={{}}"]
    with comgra.trace("debug", root="runs", overrides=changes) as session:
        train()
    print(session.path)
try:
    comgra.open_run("runs")
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
def test_recording_and_resuming_need_no_extra(wheel: Path, tmp_path: Path) -> None:
    light = Environment(tmp_path, without=OPTIONAL)
    light.install(wheel)
    (tmp_path / "resumed.py").write_text(RESUMED)
    done = tried(light.python, "resumed.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the rules start over" in done.stderr
    assert "Traceback" not in done.stderr
    *printed, error = done.stdout.splitlines()
    runs = [line for line in printed if line.startswith("/")]
    assert len(runs) == 2
    assert runs[0] == runs[1], "the second training should continue the run of the first"
    assert "pip install 'comgra-decl[read]'" in error
    (recorded,) = list_runs(tmp_path / "runs")
    assert (recorded.state, recorded.error) == ("finished", None)
    needed_by(light, ("run", "dry_run=true", "quiet.py"), "read", folder=tmp_path)


def needed_by(light: Environment, command: tuple[str, ...], extra: str, *, folder: Path) -> None:
    """Assert that a command trains nothing, and says which extra it needs."""
    (folder / "quiet.py").write_text(f"{TRAINING}\ntrain()\n")
    done = tried(light.bin / "comgra-decl", *command, cwd=folder)
    assert done.returncode == 2, command
    assert "Traceback" not in done.stderr
    assert "loss" not in done.stdout, "the program should not have trained"
    assert f"pip install 'comgra-decl[{extra}]'" in done.stderr


@pytest.mark.slow
def test_each_command_says_which_extra_it_needs(wheel: Path, tmp_path: Path) -> None:
    light = Environment(tmp_path, without=OPTIONAL)
    light.install(wheel)
    needed_by(light, ("diagnose", "runs"), "read", folder=tmp_path)
    needed_by(light, ("view", "runs"), "view", folder=tmp_path)
    needed_by(light, ("mcp", "runs"), "mcp", folder=tmp_path)
    needed_by(light, ("plan", "quiet.py"), "read", folder=tmp_path)


@pytest.mark.slow
def test_all_three_doors_record(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(HYDRA_DATACLASS)
    (tmp_path / "script.py").write_text(f"{TRAINING}\ntrain()\n")
    (tmp_path / "block.py").write_text(
        f"import comgra_decl as comgra\n{TRAINING}\nwith comgra.trace('debug'):\n    train()\n"
    )
    doors = (["app.py", "+comgra=debug"], ["-m", "comgra_decl", "script.py"], ["block.py"])
    for door in doors:
        assert loss_of(run(environment.python, *door, cwd=tmp_path)) == plain_loss()
    found = recorded(environment, tmp_path)
    assert found == {(name, "finished", 11) for name in ("app", "script", "block")}


@pytest.fixture
def address(environment: Environment, trained: Path) -> Iterator[str]:
    """Address at which the installed viewer serves the recorded runs."""
    command = [str(environment.bin / "comgra-decl"), "view", "runs", "--port", "0", "--no-show"]
    server = subprocess.Popen(
        command, cwd=trained, env=_environment(), stdout=subprocess.PIPE, text=True
    )
    with server:
        assert server.stdout is not None
        lines = iter(server.stdout.readline, "")
        try:
            yield next(word for line in lines for word in line.split() if "://" in word)
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0


@pytest.mark.slow
def test_the_viewer_shows_them(address: str) -> None:
    assert address.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(address, timeout=120) as response:
        assert response.status == 200
        assert "comgra" in response.read().decode()


@pytest.mark.slow
def test_an_editable_install_is_the_repository_and_the_plugin(tmp_path: Path) -> None:
    code = f"import hatchling.build as build; build.build_editable({str(tmp_path)!r})"
    run(sys.executable, "-c", code, cwd=ROOT)
    environment = Environment(tmp_path)
    environment.install(only("*.whl", tmp_path))
    version = environment.output("import comgra_decl; print(comgra_decl.__version__)")
    assert environment.gained() == {
        "_comgra_decl.pth",
        "hydra_plugins",
        f"comgra_decl-{version}.dist-info",
    }
    modules = "comgra_decl, comgra_decl.viewer, comgra_decl.configs"
    path = environment.output(f"import {modules}; print(comgra_decl.__path__[0])")
    assert Path(path) == ROOT / "comgra_decl"
    (tmp_path / "app.py").write_text(HYDRA_DATACLASS)
    listed = run(environment.python, "app.py", "+comgra=light", "--cfg", "hydra", cwd=tmp_path)
    assert "comgra_decl.doors.hydra.TraceCallback" in listed
    door = "import importlib.metadata as m; print(m.entry_points(group='torch.backends').names)"
    assert "comgra-decl" in environment.output(door)


def test_the_conda_recipe_requires_what_the_wheel_requires() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    renamed = {"torch": "pytorch", "ml-dtypes": "ml_dtypes"}

    def needs(requirements: Iterable[str]) -> set[tuple[str, str]]:
        found = (Requirement(each) for each in requirements if "comgra-decl" not in each)
        return {(renamed.get(r.name, r.name), str(r.specifier)) for r in found}

    recipe = yaml.safe_load((ROOT / ".ci" / "conda" / "recipe.yaml").read_text())
    core, whole = (
        [r for r in output["requirements"]["run"] if "pin_subpackage" not in r]
        for output in recipe["outputs"]
    )
    listed = [
        {(r.name, str(r.specifier)) for r in map(Requirement, each)} for each in (core, whole)
    ]
    assert listed[0] == needs(project["dependencies"]) | {("python", project["requires-python"])}
    assert listed[1] == needs([*extras["read"], *extras["view"], *extras["fast"]])
    assert recipe["context"]["version"] == comgra_decl.__version__


def test_the_repository_contains_only_the_product() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(
        [git, "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    files = [PurePath(name) for name in listed.split("\0") if name]
    folders = {file.parts[0] for file in files if len(file.parts) > 1}
    assert folders == {
        ".ci",
        "benchmarks",
        "comgra_decl",
        "configs",
        "docs",
        "examples",
        "tests",
        "viewer",
    }
    assert not [file for file in files if ".ocdbt" in str(file)], "recorded runs in the repository"
