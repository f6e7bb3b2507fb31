"""The command `comgra-decl compact`."""

from __future__ import annotations

from comgra_decl.cli.printing import AsJson, RunPath, bytes_text, print_json, run_folder, say

PANEL = "Keep"


def command(run: RunPath, as_json: AsJson = False) -> None:
    """Make a run that has ended smaller; every number stays the same.

    Leaves out what is stored twice, to be seen at once while the run was live, and old versions of
    the index. Reads everything before it changes anything; may be killed at any moment.
    """
    from comgra_decl.cli.printing import bar
    from comgra_decl.store.compaction import compact
    from comgra_decl.store.copying import databases

    folder = run_folder(run)
    with bar() as tell:
        done = [compact(path, progress=tell) for path in databases(folder)]
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
        say(
            f"{folder}: {bytes_text(before)} in {files[0]} files are now "
            f"{bytes_text(after)} in {files[1]} files"
        )
