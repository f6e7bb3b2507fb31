"""What keeps a run's folder data: which code may import by name, and which may open files there."""

from __future__ import annotations

import ast
import re

from tests.house import calls, sources

DYNAMIC = {
    "import_module",
    "__import__",
    "instantiate",
    "locate",
    "exec",
    "eval",
    "run_path",
    "run_module",
    "exec_module",
    "spec_from_file_location",
    "get_class",
    "get_method",
    "resolve_name",
    "unpickle",
    "literal_eval",
}

MAY_IMPORT = {
    "__init__.py": "its own parts",
    "integrations/__init__.py": "its own parts",
    "cli/commands/__init__.py": "its own commands",
    "export/exporting.py": "its own formats",
    "errors.py": "optional packages that the code itself names",
    "rules/catalogue.py": "its own rules",
    "rules/own.py": "a rule of the spec; of a stored one only where it is trusted",
    "torch_private.py": "parts of torch, by a list of its own",
    "hooks/patches.py": "compiles a stand-in with the parameters of what it stands for",
    "hooks/probing/samples.py": "a function that the spec of a program names, while it trains",
    "hooks/tensors/categories.py": "a function that the spec of a program names, while it trains",
    "hooks/tensors/opt_in_statistics.py": "a function that the spec of a program names",
    "hooks/schedule/types.py": "a function that the spec of a program names, while it trains",
    "keep/triggers.py": "a function that the spec of a program names, while it trains",
    "doors/checked_spec.py": "the functions that the spec of a program names, before it trains",
    "doors/script.py": "the user's own script",
    "cli/watched_script.py": "the user's own script",
    "cli/returned.py": "the user's own function",
    "viewer/custom.py": "the file of views that the user names",
}

NEVER = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}

OPENS = {
    "open",
    "read_text",
    "read_bytes",
    "fdopen",
    "memmap",
    "fromfile",
    "copy2",
    "copyfile",
    "copytree",
    "rglob",
    "glob",
    "safe_load",
    "shutil.copy",
    "np.load",
    "json.load",
    "OmegaConf.load",
}

NO_FILES = re.compile(
    r"(db|database|catalogue|session)\.(open|read_bytes)"
    r"|^Database\(|__file__|_FOLDER"
)
"""Our methods with such a name, and files of the package."""

READS_RUNS = ("store", "query", "rules", "export", "viewer")

MAY_OPEN = {
    "store/folder.py": "the one way",
    "store/index.py": "the index of a database that this program writes, in a process of its own",
    "store/database.py": "TensorStore, after `strange_file` has looked",
    "store/meta.py": "/proc",
    "store/usage.py": "/proc",
    "store/locking.py": "a folder, to lock it",
    "store/last_seen.py": "the file that it writes, to sync it",
    "store/compaction.py": "a folder, to sync it; and counts bytes of a database without reading",
    "store/remote.py": "objects in a bucket",
    "rules/contract.py": "the contract that the user names, as text",
    "export/zarr.py": "what it has written itself",
    "export/trace.py": "the file that it writes",
    "viewer/custom.py": "the file of views that the user names",
    "viewer/login.py": "the file of passwords that the user names",
    "viewer/notebook.py": "files of Panel",
}


def used(name: str, tree: ast.Module, wanted: set[str]) -> list[str]:
    return [
        f"{name}:{call.lineno} {what}"
        for what, call in calls(tree)
        if {what, what.rpartition(".")[2]} & wanted and not NO_FILES.search(what)
    ]


def test_only_those_who_have_a_reason_import_by_name() -> None:
    found = {name: used(name, tree, DYNAMIC) for name, tree in sources()}
    there = {name: lines for name, lines in found.items() if lines}
    assert set(there) == set(MAY_IMPORT), {n: there.get(n) for n in set(there) ^ set(MAY_IMPORT)}


def test_a_class_of_a_stored_spec_is_imported_in_one_place_only_if_trusted() -> None:
    callers = [
        line
        for name, tree in sources("rules", "query", "viewer", "store", "export", "launch")
        for line in used(name, tree, {"imported_rule"})
    ]
    assert len(callers) == 1, callers
    assert callers[0].startswith("rules/catalogue.py")


def test_nothing_reads_pickles() -> None:
    for name, tree in sources():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not NEVER & {part.partition(".")[0] for part in names}, name
        assert not used(name, tree, {"unpickle", "read_pickle", "torch.load"}), name


def test_files_of_a_run_are_opened_in_one_way() -> None:
    found = {name: used(name, tree, OPENS) for name, tree in sources(*READS_RUNS)}
    odd = {name: lines for name, lines in found.items() if lines and name not in MAY_OPEN}
    assert not odd


def test_every_exception_is_still_needed() -> None:
    found = {name for name, tree in sources() if used(name, tree, OPENS | {"scandir", "iterdir"})}
    assert set(MAY_OPEN) <= found, set(MAY_OPEN) - found
