"""The page on cost and the presets state what was measured."""

from __future__ import annotations

import pytest

from comgra_decl.records import RAW_STATISTICS
from comgra_decl.spec.loading import presets
from comgra_decl.stats import device, fused, moments
from docs import cost

MIB = 1 << 20


def test_the_page_is_that_of_the_newest_measurement() -> None:
    figures = cost.newest(), cost.newest_comparison(), cost.newest_counts()
    others = cost.newest_probes(), cost.newest_around(), cost.newest_previews()
    page = cost.page(*figures, *others)
    if page != cost.PAGE.read_text():
        pytest.fail("docs/cost.md is not what was measured: run `python -m docs.cost`")


@pytest.mark.parametrize("name", presets())
def test_a_preset_states_the_price_that_was_measured(name: str) -> None:
    content = presets()[name].read_text()
    price = cost.price(cost.newest(), name)
    assert cost.priced(content, price) == content
    assert content.count("# Cost of a recorded step") == bool(price)


def test_the_page_compares_this_version_with_an_earlier_one() -> None:
    ratio = {"value": 1.017, "low": 0.99, "high": 1.052}
    comparison = {
        "date": "2026-01-02",
        "older": "abc1234",
        "rounds": 9,
        "machine": {"load_before": 0.25},
        "comparisons": [
            {
                "net": "mlp",
                "tool": "debug",
                "steps": [0.001771, 0.0018],
                "step": ratio,
                "cpu": {**ratio, "value": 0.98},
            }
        ],
    }
    page = cost.page(cost.newest(), comparison, {}, {}, {})
    _, _, section = page.partition("## Compared with an earlier version\n")
    row = "| `debug` | mlp | 1.77 ms | 1.8 ms | 1.02 (0.99 to 1.05) | 0.98 |"
    assert row in section.partition("\n## ")[0].splitlines()
    assert "commit abc1234" in section
    assert "load of 0.25" in section


def test_the_page_states_the_instructions_that_were_counted() -> None:
    comparison = {**cost.newest_comparison(), "comparisons": []}
    counts = {
        "date": "2026-01-02",
        "older": "abc1234",
        "counted": [
            {
                "net": "mlp",
                "tool": "record",
                "older": {"training": 4_000_400, "others": 1_000_000},
                "this": {"training": 4_100_000, "others": 1_400_300},
            }
        ],
    }
    page = cost.page(cost.newest(), comparison, counts, {}, {})
    assert "| `record` | mlp | 4,000 | 4,100 | 1.02 | 1.10 |" in page.splitlines()


def test_the_page_states_what_pictures_cost() -> None:
    probes = {
        "date": "2026-01-02",
        "passes": [
            {"method": "saliency", "forward": 1, "backward": 1, "second": 0}
            | {"expected": 0.002, "taken": 0.0021, "ratio": 1.05}
        ],
        "between": {"plain": 1.0, "again": 0.99, "traced": 1.01, "declared": 1.02},
        "budget": [
            {"net": "images", "picture": "grad_cam", "budget": "2%", "share": 0.019, "records": 9}
        ],
        "memory": [{"records": 100, "mb": 600.2}, {"records": 1000, "mb": 601.1}],
    }
    page = cost.page(cost.newest(), cost.newest_comparison(), {}, probes, {})
    section = page.partition("## Pictures of a probe\n")[2].partition("\n## ")[0]
    rows = section.splitlines()
    assert "| `saliency` | 1 | 1 | 0 | 2 ms | 2.1 ms | 1.05 |" in rows
    assert "| `grad_cam` of images | 2% | 9 | 1.9% |" in rows
    words = " ".join(rows)
    assert "took 600 MB after 100 records and 601 MB after 1,000" in words
    assert "1.02 times as long as an untraced one if a probe is declared" in words


def test_the_memory_that_a_record_takes_on_a_device_is_limited_as_the_page_says() -> None:
    parts, tables = fused._MOST_LIVE, fused._MOST_TABLES
    held = copied = device._MOST_BYTES_HELD
    row = RAW_STATISTICS * 8
    part = device._PART * 8  # in float64, plus a centred copy
    # one tensor beyond the parts: the rows of all its samples, or those computed at a time
    largest = max(moments.MOST_ROWS, moments.CHUNK_ROWS) * row
    assert 2 * part <= largest  # the two never occur at the same time
    assert parts + tables + held + copied + largest <= 64 * MIB
    text = " ".join(cost.PAGE.read_text().split())
    for said in (
        f"transferred in parts of {parts // MIB} MiB",
        f"at most {held // MIB} MiB of small tensors are kept",
        f"the tables of tensors to read take {tables // MIB} MiB",
        f"more than {moments.MOST_ROWS:,} samples, only the statistics",
        f"of its first {moments.KEPT:,} samples are kept",
        f"computed for at most {moments.CHUNK_ROWS:,} samples at a time",
        f"copies take at most {copied // MIB} MiB at a time",
        f"Copies of more than {device._MOST_COPIED // MIB} MiB are made in parts",
        "this takes at most 64 MiB",
    ):
        assert said in text


def test_every_preset_is_on_the_page() -> None:
    page = cost.PAGE.read_text()
    assert [name for name in presets() if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("key", ["_target_: a", "defaults: [debug]"])
def test_a_price_replaces_the_one_before(key: str) -> None:
    before = f"# @package x\n# For looking.\n# Cost of a recorded step: x9\n# more.\n{key}\n"
    after = f"# @package x\n# For looking.\n# Cost: new\n{key}\n"
    assert cost.priced(before, ["# Cost: new"]) == after
    assert cost.priced(before, []) == before


def test_the_page_states_the_price_of_what_is_around_the_network() -> None:
    ratio = {"value": 1.0214, "low": 1.019, "high": 1.03}
    prices = {
        "date": "2026-01-02",
        "rounds": 9,
        "machine": {"load_before": 0.25},
        "prices": [
            {"label": "idle", "net": "mlp", "tool": "idle", "step": 0.000172, "ratio": ratio}
        ],
        "post_mortem": {"mlp": 0.25},
    }
    page = cost.page(cost.newest(), cost.newest_comparison(), {}, {}, prices)
    _, _, section = page.partition("## Around the network\n")
    lines = section.partition("\n## ")[0].splitlines()
    assert "| idle | mlp | 0.172 ms | 1.021 (1.019 to 1.030) |" in lines
    assert "| the post-mortem of an error | mlp | 250 ms, once | |" in lines
    without = cost.page(cost.newest(), cost.newest_comparison(), {}, {}, {})
    assert "## Around the network" not in without


def test_the_page_states_the_price_of_previews() -> None:
    ratio = {"value": 1.013, "low": 1.001, "high": 1.02}
    price = {
        "net": "images", "tool": "default", "label": "in every 50th record (default)",
        "step": 0.0123, "ratio": ratio, "cpu": {**ratio, "value": 1.01}, "bytes": 12345.6,
        "grown": 1.234,
    }  # fmt: skip
    prices = {"date": "2026-01-02", "rounds": 5, "machine": {"load_before": 0.5}, "prices": [price]}
    page = cost.page(cost.newest(), cost.newest_comparison(), {}, {}, {}, prices)
    _, _, section = page.partition("## Previews\n")
    row = (
        "| in every 50th record (default) | images | 12.3 ms | 1.013 (1.001 to 1.020) | 1.01 | "
        "12,346 | 1.23 |"
    )
    assert row in section.partition("\n## ")[0].splitlines()
    assert "load of 0.5" in section
