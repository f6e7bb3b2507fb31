"""The command `comgra-decl compact`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from comgra_decl.cli.printing import AsJson, RunPath, bytes_text, print_json, print_line, run_folder

if TYPE_CHECKING:
    from comgra_decl.store.location import Location

PANEL = "Keep"


Join = Annotated[
    bool,
    typer.Option(
        "--join", help="Write the joined statistics of all ranks, instead of reducing the size."
    ),
]


def command(run: RunPath, join: Join = False, as_json: AsJson = False) -> None:
    """Reduce the size of a finished run without changing its data.

    Removes old versions of the index, and the duplicate data that made records available
    immediately while the run was live. Reads all data before it changes anything, and can safely be
    killed at any time.

    With --join, writes one database with the joined statistics of a run of several ranks. The data
    of the ranks stays.
    """
    from comgra_decl.cli.printing import bar
    from comgra_decl.store.compaction import compact
    from comgra_decl.store.copying import databases

    folder = run_folder(run)
    if join:
        _join(folder, as_json=as_json)
        return
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


def _join(folder: Location, *, as_json: bool) -> None:
    from comgra_decl.cli.printing import bar
    from comgra_decl.errors import StoreError
    from comgra_decl.query.ranks.reader import JoinedReader, open_reader

    reader = open_reader(folder)
    if not isinstance(reader, JoinedReader) or len(reader.readers) < 2:
        raise StoreError(f"{str(folder)!r} was recorded by one process, so nothing can be joined.")
    with bar() as on_progress:
        written = reader.join(on_progress)
    size = sum(path.stat().st_size for path in written.rglob("*") if path.is_file())
    if as_json:
        print_json({"path": str(folder), "joined": str(written), "bytes": size})
    else:
        ranks = len(reader.readers)
        print_line(f"{folder}: joined the statistics of {ranks} ranks, {bytes_text(size)}")
