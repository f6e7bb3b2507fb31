"""A handle on one recorded tensor, and which of its attributes are properties or methods."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest

from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Group, Run, Slot, open_run
from tests.query.conftest import NODES, STEPS
from tests.support.fake_run import FakeRun


def test_a_handle_says_which_tensor_it_is(run: Run) -> None:
    slot = run.slot("cell", iteration=2)
    assert (slot.node, slot.role, slot.pass_name, slot.iteration) == (
        "cell",
        "output",
        "forward",
        2,
    )
    assert (slot.kind, slot.dtype, slot.batch_dim) == ("computed", "float32", 0)
    assert repr(slot) == "<Slot 'cell', role 'output', pass 'forward', iteration 2: float32>"


def test_brackets_give_the_output_of_a_node(run: Run) -> None:
    assert run["head"].series("std").equals(run.slot("head").series("std"))
    assert run["head"].series("std").equals(run.series("head", "std"))
    with pytest.raises(UnknownNameError, match="did you mean 'head'"):
        run["haed"]


def test_the_gradient_of_a_tensor_is_one_attribute_away(run: Run) -> None:
    slot = run.slot("head")
    assert slot.passes == ["forward", "grad"]
    assert slot.grad.pass_name == "grad"
    assert slot.grad.series("l2").equals(run.slot("head", of="grad").series("l2"))
    assert slot.grad.of("forward").series().equals(slot.series())


def test_where_there_is_no_single_gradient_the_error_names_what_there_is(run: Run) -> None:
    with pytest.raises(UnknownNameError, match=r"'input' .* has no gradient. It has 'forward'"):
        run.slot("input", role="input").grad  # noqa: B018
    with pytest.raises(UnknownNameError, match=r"did you mean 'grad'\?"):
        run.slot("head").of("gard")


def test_samples_are_a_column_each(run: Run) -> None:
    table = run.slot("head").samples("mean")
    assert table.shape == (STEPS, run.sample_count)
    assert (table.index.name, table.columns.name) == ("step", "sample")
    row = run.slot("head").row(7)["mean"]
    np.testing.assert_array_equal(table.loc[7].to_numpy(), row.to_numpy())


def test_a_handle_follows_its_run(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", nodes=NODES)
    fake.write(3)
    run = open_run(tmp_path / "run")
    slot = run.slot("head")
    fake.write(2)
    assert len(slot.series()) == 3, "nothing changes until the run is refreshed"
    run.refresh()
    assert len(slot.series()) == 5


@pytest.mark.parametrize("kind", [Run, Slot, Group])
def test_what_is_cheap_and_takes_nothing_is_a_property(kind: type) -> None:
    """Methods take arguments, or read something that may be large."""
    reading = {"kpis", "notes", "findings", "experiments", "noted", "chunks", "rank_differences",
               "refresh", "metrics_as_stored", "differences", "overview", "histograms", "shapes",
               "close", "memory", "module_times"}  # fmt: skip
    for name, member in inspect.getmembers(kind):
        if name.startswith("_") or not inspect.isfunction(member):
            continue
        parameters = list(inspect.signature(member).parameters)[1:]
        assert parameters or name in reading, f"{kind.__name__}.{name} should be a property"
