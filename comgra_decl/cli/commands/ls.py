"""The command `comgra-decl ls`."""

from __future__ import annotations

from pathlib import Path

from comgra_decl.cli.printing import AsJson, Everything, Root, print_json, print_line, shortened

PANEL = "Look"


def command(
    root: Root = Path("runs"), everything: Everything = False, as_json: AsJson = False
) -> None:
    """List the runs in a folder, oldest first.

    JSON of more than 20 kB contains the newest runs; "left_out" tells how many are missing.
    """
    from comgra_decl.cli.describe import describe_summary
    from comgra_decl.query import location, require_folder
    from comgra_decl.query.index import Index
    from comgra_decl.query.listing import listed

    require_folder(location(root))
    index = Index(location(root))
    runs = [describe_summary(summary) for summary in listed(index)]
    if as_json:
        content = {"runs": runs[::-1]}
        content = content if everything else shortened(content)
        print_json({**content, "runs": content["runs"][::-1]}, everything=True)
    elif not runs:
        print_line(f"There are no runs in {location(root)} yet.")
        for sentence in index.creating:
            print_line(sentence[:1].upper() + sentence[1:])
    else:
        from comgra_decl.cli.tables import runs_table
        from comgra_decl.terminal import console

        console().print(runs_table(runs))
