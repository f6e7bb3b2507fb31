"""A disk that fills up and later has space again: a real file system of 6 MB."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.database import TransientStoreError
from tests.store import endless
from tests.store.truth import meta_of

folder = Path(sys.argv[1])
ballast = folder / "ballast"
ballast.write_bytes(bytes(2_000_000))
writer = RunWriter.create(folder / "run", meta_of())
refused = 0
while writer.records < 900 or ballast.exists():
    try:
        writer.commit([endless.batch_of(writer.records, 60)])
    except TransientStoreError as error:
        assert "No space left" in str(error) or "RESOURCE_EXHAUSTED" in str(error)
        refused += 1
        view = Reader(folder / "run").view
        assert view.n == writer.records
        endless.check(view)
        ballast.unlink()
assert refused == 1
endless.check(Reader(folder / "run").view)
print("survived")
"""


def in_namespace(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a shell command where `folder` is a file system of 6 MB."""
    mounted = f'mount -t tmpfs -o size=6m none "$0" && {command}'
    unshare = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, str(folder)]
    root = Path(__file__).parents[2]
    return subprocess.run(unshare, cwd=root, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs Linux namespaces")
def test_the_same_writer_goes_on_when_there_is_space_again(tmp_path: Path) -> None:
    if in_namespace("true", tmp_path).returncode:
        pytest.skip("this machine does not allow mounting in a namespace")
    script = tmp_path / "script.py"
    folder = tmp_path / "small"
    folder.mkdir()
    script.write_text(SCRIPT)
    command = f'PYTHONPATH=. "{sys.executable}" "{script}" "$0"'
    done = in_namespace(command, folder)
    assert done.stdout == "survived\n", done.stderr
