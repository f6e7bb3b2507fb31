"""`begin.py SCRIPT ARGUMENTS`: run a script in a forked process with torch already imported.

Does what `sitecustomize` and the import of torch would have done in a new process.
"""

from __future__ import annotations

import builtins
import os
import resource
import runpy
import sys
from pathlib import Path
from types import ModuleType


def main() -> None:
    """Run the script as `__main__`."""
    script, *arguments = sys.argv[1:]
    limit = int(os.environ.get("SCRIPTS_LIMIT", "0"))
    if limit:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    here = str(Path(__file__).resolve().parent)
    runpy.run_path(str(Path(here) / "sitecustomize.py"))
    sys.path[:] = [entry for entry in sys.path if entry != here]
    from comgra_decl.doors.environment import attach

    attach()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    module = ModuleType("__main__")  # keeps the script's globals alive until exit
    vars(module).update(__file__=script, __builtins__=builtins)
    sys.modules["__main__"] = module
    exec(compile(Path(script).read_bytes(), script, "exec"), vars(module))


main()
