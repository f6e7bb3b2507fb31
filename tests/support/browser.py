"""The browser of all tests, one per test session, because Playwright allows only one at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # One process for all pages keeps scripts compiled, a fifth of the time of opening a page.
    "--process-per-site",
    "--renderer-process-limit=1",
]


def browser_path() -> str | None:
    """Returns the Chromium to use, or None."""
    names = [os.environ.get("CHROMIUM"), "/usr/bin/chromium"]
    found = [name for name in names if name and Path(name).exists()]
    return found[0] if found else shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser, headless: `CHROMIUM`, `/usr/bin/chromium` or that on the PATH.

    Tests that need it are skipped if there is none.
    """
    playwright = pytest.importorskip("playwright.sync_api")
    path = browser_path()
    if path is None:
        pytest.skip("no Chromium on this machine (set CHROMIUM to its path)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()
