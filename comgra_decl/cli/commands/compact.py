"""The command `comgra-decl compact`."""

from __future__ import annotations

from comgra_decl.cli.printing import AsJson, RunPath, bytes_text, print_json, print_line, run_folder

PANEL = "Keep"


def command(run: RunPath, as_json: AsJson = False) -> None:
    """Reduce the size of a finished run without changing its data.

    Removes old versions of the index, and the duplicate data that made records available
    immediately while the run was live. Reads all data before it changes anything, and can safely be
    killed at any time.
    """
    from comgra_decl.cli.printing import bar
    from comgra_decl.store.compaction import compact
    from comgra_decl.store.copying import databases

    folder = run_folder(run)
    with bar() as on_progress:
        done = [compact(path, progress=on_progress) for path in databases(folder)]
    before, after = sum(part.bytes_before for part in done), sum(p.bytes_after for p in done)
    files = sum(part.files_before for part in done), sum(part.files_after for part in done)
    if as_json:
        print_json(
            {
                "path": str(folder),
                "bytes_before": before,
                "bytes_after": after,
                "files_before": files[0],
                "files_after": files[1],
            }
        )
    else:
        print_line(
            f"{folder}: reduced from {bytes_text(before)} in {files[0]} files to "
            f"{bytes_text(after)} in {files[1]} files"
        )
