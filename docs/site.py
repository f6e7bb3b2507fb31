"""Build the documentation as a website that works offline: `python -m docs.site [--gallery]`.

MkDocs loads this file as a hook. Pages link to files outside `docs`, such as tests and figures.
These files become part of the site, below `repository/`, so that every link leads somewhere without
a network.
"""

from __future__ import annotations

import argparse
import json
import logging
import posixpath
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = "repository"
"""The folder of the site that contains files from outside `docs`."""

_SHIM = "https://unpkg.com/iframe-worker/shim"
_WORKER = "assets/javascripts/worker.js"
_FROM_TEXT = """\
// Browsers load no worker from a file, but they do from a text in the page.
const text = {text};
const Native = window.Worker;
window.Worker = class extends Native {{
  constructor() {{ super(URL.createObjectURL(new Blob([text], {{ type: "text/javascript" }}))); }}
}};
"""

_LINK = re.compile(r"(?P<text>\[[^\]]*\]\()(?P<path>[^)\s#:]+)(?P<rest>(#[^)\s]*)?\))")
_NOT_IN_A_NAME = re.compile(r"[^\w\- ]")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name headings as GitHub does, because links in the pages work there, too."""
    config.mdx_configs["toc"]["slugify"] = _slug
    if config.nav is not None and config.extra.get("gallery") is not None:
        config.nav.insert(1, "gallery.md")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, and those that the added pages link to."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    known = {*waiting}
    for path in waiting:
        for linked in _links((ROOT / path).read_text(), path):
            if linked in known or linked.startswith("docs/"):
                continue
            known.add(linked)
            source = str(ROOT / linked)
            new = File.generated(config, _outside(linked), abs_src_path=source)
            new.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(new)
            if linked.endswith(".md"):
                waiting.append(linked)
    gallery = config.extra.get("gallery")
    for path in [] if gallery is None else [*gallery.rglob("*.*")]:
        name = path.relative_to(gallery).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the places of their files in the site."""
    uri = page.file.src_uri
    inside = uri.removeprefix(f"{OUTSIDE}/")
    path = inside if uri != inside else f"docs/{uri}"

    def place(match: re.Match[str]) -> str:
        target = _target(match["path"], path)
        if target is None:
            return match[0]
        there = target.removeprefix("docs/") if target.startswith("docs/") else _outside(target)
        link = posixpath.relpath(there, posixpath.dirname(uri) or ".")
        return f"{match['text']}{link}{match['rest']}"

    return _LINK.sub(place, markdown)


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """Search without a network in the page for missing addresses, as in all others."""
    return output.replace(_SHIM, f"/{_WORKER}")


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Search without a network: replace a script that the theme would load from another host."""
    return output.replace(_SHIM, posixpath.relpath(_WORKER, posixpath.dirname(page.url) or "."))


def on_post_build(config: MkDocsConfig) -> None:
    """Write the script that starts the theme's search, which is a worker, in pages from files."""
    site = Path(config.site_dir)
    (worker,) = (site / "assets/javascripts/workers").glob("search.*.js")
    script = _FROM_TEXT.format(text=json.dumps(worker.read_text()).replace("</", "<\\/"))
    (site / _WORKER).write_text(f'if (location.protocol === "file:") {{\n{script}}}\n')


def _links(markdown: str, path: str) -> Iterator[str]:
    """Yield the files that a page links to, relative to the repository."""
    for match in _LINK.finditer(markdown):
        target = _target(match["path"], path)
        if target is not None:
            yield target


def _target(link: str, path: str) -> str | None:
    """Return the file that a link leads to, relative to the repository; None if there is none.

    A link to a folder leads to its README.
    """
    there = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if (ROOT / there / "README.md").is_file():
        there = f"{there}/README.md"
    return there if (ROOT / there).is_file() else None


def _outside(path: str) -> str:
    """Return the place in the site of a file outside `docs`; browsers show `.txt` files."""
    shown = path.endswith((".md", ".png", ".json"))
    return f"{OUTSIDE}/{path}" if shown else f"{OUTSIDE}/{path}.txt"


def _slug(title: str, separator: str) -> str:
    """Return the name of a heading as GitHub forms it."""
    return _NOT_IN_A_NAME.sub("", title.lower()).strip().replace(" ", separator)


def main() -> None:
    """Build the site; fail if any link leads nowhere."""
    parser = argparse.ArgumentParser(prog="python -m docs.site", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "site")
    parser.add_argument("--gallery", nargs="*", metavar="BUG", help="add a gallery (default: all)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    with tempfile.TemporaryDirectory() as folder:
        gallery = None if options.gallery is None else Path(folder)
        if gallery is not None:
            from docs.gallery import SHOWN, write

            write(gallery, names=options.gallery or [*SHOWN])
        site: dict[str, Any] = {"site_dir": str(options.folder.absolute())}
        config = load_config(str(ROOT / "mkdocs.yml"), strict=True, **site)
        config.extra["gallery"] = gallery
        build(config)


if __name__ == "__main__":
    main()
