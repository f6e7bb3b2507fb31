"""Harvested activations equal those that plain hooks see, however often the harvest is stopped."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread, get_ident
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import comgra_decl as comgra
from comgra_decl.cli.main import main
from comgra_decl.errors import HarvestError, UnknownNameError
from comgra_decl.experiments import harvest as module
from comgra_decl.store.locking import taken_if_free

WIDTH, TOKENS = 6, 11


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x.mean(1))


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def words(*sizes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(TOKENS, size, generator=generator) for size in sizes]


def by_hooks(model: Net, batches: list[Tensor], layer: int) -> np.ndarray[Any, Any]:
    """Return the outputs of a layer, one row for each position."""
    with torch.no_grad():
        return np.concatenate([
            model.layers[layer](
                model.embed(b) if layer == 0 else torch.tanh(model.layers[0](model.embed(b)))
            ).reshape(-1, WIDTH).numpy()
            for b in batches
        ])  # fmt: skip


def same(one: Any, other: Any) -> None:
    """Compare, up to the order of additions in a matrix product."""
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "_FEWEST", 8)
    monkeypatch.setattr(module, "_MOST", 8)
    return 8


def test_each_position_is_a_row_and_its_origin_is_known(tmp_path: Path) -> None:
    model, batches = net(), words((3, 4), (2, 5))
    found = comgra.harvest(model, batches, tmp_path / "h", select="layers.*")
    assert repr(found) == "<Harvest of 22 rows, float32: layers.0 6, layers.1 6>"
    assert found.complete
    for layer in (0, 1):
        same(found.read(f"layers.{layer}"), by_hooks(model, batches, layer))
    origins = [(0, s, p) for s in range(3) for p in range(4)]
    origins += [(1, s, p) for s in range(2) for p in range(5)]
    assert [tuple(row) for row in found.origins().tolist()] == origins
    assert not model.layers[0]._forward_hooks
    again = comgra.open_harvest(tmp_path / "h")
    same(again.read("layers.1", [3, 20]), by_hooks(model, batches, 1)[[3, 20]])
    same(again.read("layers.1", slice(1, 20, 3)), by_hooks(model, batches, 1)[1:20:3])


def test_names_of_modules_are_names_of_arrays_whatever_they_are(tmp_path: Path) -> None:
    """Among them those that the arrays of the model and of the origins could have."""
    names = ("model", "index", "origins", "a/b", "/out", "@model", "harvest json")

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts.values():
                x = part(x)
            return x

    torch.manual_seed(0)
    model, x = Odd(), torch.randn(3, 2)
    selected = ["", *(f"parts.{name}" for name in names)]
    patterns = [{"class": "Odd"}, {"class": "Linear"}]
    found = comgra.harvest(model, [x], tmp_path / "h", select=patterns)
    assert [*found.nodes] == selected
    again = comgra.open_harvest(tmp_path / "h")
    with torch.no_grad():
        for name in names:
            x = model.parts[name](x)
            same(again.read(f"parts.{name}"), x)
        same(again.read(""), x)
    assert {path.name for path in tmp_path.iterdir()} == {"h"}
    assert len([*(tmp_path / "h").iterdir()]) == len(selected) + 2  # the origins, harvest.json


@pytest.mark.parametrize("content", ["", "[]", '{"nodes": {"a": -1}}', '{"nodes": 3}', "{"])
def test_a_damaged_description_is_no_harvest(tmp_path: Path, content: str) -> None:
    (tmp_path / "harvest.json").write_text(content)
    with pytest.raises(HarvestError, match="contains no harvest"):
        comgra.open_harvest(tmp_path)


def test_other_programs_read_the_arrays(tmp_path: Path) -> None:
    model, batches = net(), words((3, 4))
    comgra.harvest(model, batches, tmp_path / "h", select="layers.1", dtype="float16")
    array: Any = zarr.open_array(tmp_path / "h" / "layers.1", mode="r")
    assert array.shape == (12, WIDTH)
    assert array.dtype == np.float16
    np.testing.assert_allclose(array[:], by_hooks(model, batches, 1), atol=1e-3)


def test_a_mask_leaves_out_padding(tmp_path: Path) -> None:
    model, (tokens,) = net(), words((3, 4))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    batch = {"tokens": tokens, "attention_mask": mask}
    everything = by_hooks(model, [tokens], 0)
    for name, how in (("key", "attention_mask"), ("function", lambda b: b["attention_mask"] > 0)):
        found = comgra.harvest(model, [batch], tmp_path / name, select="layers.0", mask=how)
        same(found.read("layers.0"), everything[mask.flatten().bool().numpy()])
        assert found.origins()[4:, 1:].tolist() == [[1, 0], [1, 1], [2, 0]]


def test_channels_of_images_and_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU()), torch.randn(3, 2, 6, 6)
    found = comgra.harvest(model, [(x,)], tmp_path / "out", select="1", features=1)
    with torch.no_grad():
        wanted = model(x).permute(0, 2, 3, 1).reshape(-1, 5)
    same(found.read("1"), wanted)
    given_ = comgra.harvest(model, [(x,)], tmp_path / "in", select="0", features=1, role="input")
    same(given_.read("0"), x.permute(0, 2, 3, 1).reshape(-1, 2))


@pytest.mark.parametrize("role", ["output", "input"])
def test_what_is_changed_in_place_afterwards_is_stored_as_it_was(tmp_path: Path, role: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True)), torch.randn(6, 4)
    node = "0" if role == "output" else "1"
    found = comgra.harvest(model, [x], tmp_path / "h", select=node, role=role)
    with torch.no_grad():
        wanted = model[0](x)
    assert wanted.min() < 0
    same(found.read(node), wanted)


def test_calls_of_the_model_in_other_threads_are_not_stored(tmp_path: Path) -> None:
    model, batches, other = net(), words((2, 3), (2, 5)), words((4, 3))[0]
    expected, harvesting = by_hooks(model, batches, 0), get_ident()

    def meanwhile(*_: Any) -> None:
        if get_ident() == harvesting:
            thread = Thread(target=model, args=(other,))
            thread.start()
            thread.join()

    handle = model.register_forward_pre_hook(meanwhile)
    found = comgra.harvest(model, batches, tmp_path / "acts", select="layers.0")
    handle.remove()
    same(found.read("layers.0"), expected)


def test_rows_are_chosen_as_in_numpy(tmp_path: Path) -> None:
    model, batches = net(), words((3, 4))
    found = comgra.harvest(model, batches, tmp_path / "h", select="layers.0")
    rows = found.read("layers.0")
    mask = rows[:, 0] > 0
    for chosen in (mask, [-1, 3], slice(-4, None), slice(2, 2), np.array([], np.int64)):
        assert np.array_equal(found.read("layers.0", chosen), rows[chosen])
    for wrong in ([12], [-13], np.ones(3, bool)):
        with pytest.raises(IndexError):
            found.read("layers.0", wrong)


def test_bfloat16_is_stored_bit_by_bit(tmp_path: Path) -> None:
    model, batches = net().to(torch.bfloat16), words((3, 4))
    found = comgra.harvest(model, batches, tmp_path / "h", select="layers.0")
    with torch.no_grad():
        wanted = model.layers[0](model.embed(batches[0])).reshape(-1, WIDTH)
    stored = found.read("layers.0")
    assert stored.dtype.name == "bfloat16"
    assert np.array_equal(stored.view(np.int16), wanted.view(torch.int16).numpy())


@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=6),
    stops=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 70)), max_size=4),
)
def test_a_harvest_that_is_stopped_goes_on_where_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[tuple[int, int]],
    stops: list[tuple[int, int]],
) -> None:
    """Stopped by an error in the data set or by `rows`, any number of times."""
    model, batches = net(), words(*sizes)
    folder = tmp_path_factory.mktemp("h") / "h"

    class StopError(Exception):
        pass

    def until(stop: int) -> Iterator[Tensor]:
        for number, batch in enumerate(batches):
            if number == stop:
                raise StopError
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FEWEST", 8)
        patch.setattr(module, "_MOST", 8)
        for stop, rows in stops:
            try:
                part = comgra.harvest(model, until(stop), folder, select="layers.*", rows=rows)
            except StopError:
                continue
            wanted = by_hooks(model, batches, 1)
            assert part.complete or part.rows >= min(rows, len(wanted))
            same(part.read("layers.1"), wanted[: part.rows])
        whole = comgra.harvest(model, batches, folder, select="layers.*")
    for layer in (0, 1):
        same(whole.read(f"layers.{layer}"), by_hooks(model, batches, layer))
    origins = [(b, s, p) for b, (n, t) in enumerate(sizes) for s in range(n) for p in range(t)]
    assert [tuple(row) for row in whole.origins().tolist()] == origins


@pytest.mark.usefixtures("small_blocks")
def test_batches_contain_every_row_once_in_order_or_shuffled(tmp_path: Path) -> None:
    model, batches = net(), words(*[(5, 5)] * 6)
    found = comgra.harvest(model, batches, tmp_path / "h", select="layers.0")
    rows = found.read("layers.0")
    parts = [*found.batches("layers.0", 32)]
    assert [len(part) for part in parts] == [32] * 4 + [22]
    assert np.array_equal(np.concatenate(parts), rows)
    shuffled = np.concatenate([*found.batches("layers.0", 32, shuffle=3)])
    assert not np.array_equal(shuffled, rows)
    assert sorted(map(tuple, shuffled.tolist())) == sorted(map(tuple, rows.tolist()))
    again = np.concatenate([*found.batches("layers.0", 10, shuffle=3)])
    assert np.array_equal(shuffled, again)
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        next(found.batches("layers.0", 0))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"select": "layer.*"}, "'layer.\\*' matches no module.*did you mean"),
        ({"select": ["layers.0", "head"]}, r"'head' has rows of the shape \[3\], but 'layers.0'"),
        ({"select": "layers.0", "mask": "mask"}, "a batch has no 'mask'"),
        ({"select": "layers.0", "mask": lambda _: torch.arange(2)}, r"mask has the shape \[2\]"),
        ({"select": "layers.0", "features": 4}, r"no dim 4"),
        ({"select": "layers.0", "features": 0}, "dim 0 contains the samples, not features"),
        ({"select": {"klass": "Linear"}}, "select: .*klass"),
        ({"select": "layers.0", "mask": lambda _: torch.ones(3, 4)}, "bools or whole numbers"),
    ],
)
def test_what_cannot_be_harvested_is_said(tmp_path: Path, asked: dict[str, Any], why: str) -> None:
    with pytest.raises(HarvestError, match=why):
        comgra.harvest(net(), words((3, 4)), tmp_path / "h", **asked)
    assert not (tmp_path / "h").exists()


@pytest.mark.parametrize(
    ("batches", "why"),
    [
        (5, "batches must be a data loader or a list, got 5"),
        (["text"], "batch 0 is 'text', not a tensor, or a tuple or mapping of tensors"),
        ([None], "batch 0 is None, not a tensor"),
    ],
)
def test_what_is_no_data_set_is_said(tmp_path: Path, batches: Any, why: str) -> None:
    with pytest.raises(HarvestError, match=why):
        comgra.harvest(net(), batches, tmp_path / "h", select="layers.0")
    assert not (tmp_path / "h").exists()


def test_folders_are_not_mixed_up(tmp_path: Path) -> None:
    model, batches = net(), words((3, 4))
    comgra.harvest(model, batches, tmp_path / "h", select="layers.0", rows=5)
    with pytest.raises(HarvestError, match=r"contains a harvest with modules \['layers.0'\]"):
        comgra.harvest(model, batches, tmp_path / "h", select="layers.1")
    with pytest.raises(HarvestError, match="contains a harvest with dtype float32, not float16"):
        comgra.harvest(model, batches, tmp_path / "h", select="layers.0", dtype="float16")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(HarvestError, match="is not empty and contains no harvest"):
        comgra.harvest(model, batches, tmp_path / "other", select="layers.0")
    with pytest.raises(HarvestError, match="contains no harvest"):
        comgra.open_harvest(tmp_path / "other")
    with pytest.raises(HarvestError, match="the data set has no batch"):
        comgra.harvest(model, [], tmp_path / "empty", select="layers.0")
    with pytest.raises(UnknownNameError, match=r"'layers\.1' was not harvested"):
        comgra.open_harvest(tmp_path / "h").read("layers.1")
    (tmp_path / "file").touch()
    with pytest.raises(HarvestError, match="is a file, not a folder"):
        comgra.harvest(model, batches, tmp_path / "file", select="layers.0")
    with pytest.raises(HarvestError, match="is not the one with which this harvest began"):
        comgra.harvest(model, words((1, 2)), tmp_path / "h", select="layers.0")
    with pytest.raises(ValueError, match=r"dtype must be one of 'bfloat16'.*got 'int8'"):
        comgra.harvest(model, batches, tmp_path / "h", select="layers.0", dtype="int8")


PROGRAM = """
import torch
from torch import nn

def data():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).eval()
    return model, (torch.full((2, 3), float(i)) for i in range(5))
"""


def test_the_command_harvests_what_a_function_returns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "activations.py").write_text(PROGRAM)
    source, target = f"{tmp_path / 'activations.py'}:data", str(tmp_path / "h")
    for arguments, rows in ((["--rows", "7"], 7), ([], 10)):
        with pytest.raises(SystemExit) as ended:
            main(["harvest", source, target, "--select", "1", *arguments])
        assert ended.value.code == 0
        assert f"{rows} rows" in capsys.readouterr().out
    space: dict[str, Any] = {}
    exec(PROGRAM, space)
    model, batches = space["data"]()
    with torch.no_grad():
        same(comgra.open_harvest(target).read("1"), torch.cat([model(b) for b in batches]))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("nowhere.py:data", "nowhere.py does not exist"),
        ("activations.py", "must be FILE.py:FUNCTION"),
        ("activations.py:dta", "has no function 'dta'; did you mean 'data'"),
    ],
)
def test_a_source_that_does_not_exist_is_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "activations.py").write_text(PROGRAM)
    with pytest.raises(SystemExit) as ended:
        main(["harvest", source, "h", "--select", "1"])
    assert ended.value.code == 2
    assert why in " ".join(capsys.readouterr().err.replace("\u2502", " ").split())


def test_a_target_that_cannot_be_created_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").touch()
    (tmp_path / "activations.py").write_text("open('loaded', 'w')\n" + PROGRAM)
    for target in ("afile", "afile/below"):
        with pytest.raises(SystemExit) as ended:
            main(["harvest", "activations.py:data", target, "--select", "1"])
        assert ended.value.code == 2
        assert "afile' is a file, not a folder" in capsys.readouterr().err
    assert not (tmp_path / "loaded").exists()


BUSY = """
import sys, torch
from pathlib import Path
from torch import nn
import comgra_decl as comgra

def batches():
    yield torch.ones(2, 3)
    print("begun", flush=True)
    sys.stdin.readline()

comgra.harvest(nn.Sequential(nn.Linear(3, 4)), batches(), sys.argv[1], select="0")
"""


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is harvesting into a folder, until it is told to go on."""
    command = [sys.executable, "-c", BUSY, str(tmp_path / "h")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield process
        process.kill()


@pytest.mark.slow
def test_two_harvests_into_one_folder_are_refused(
    tmp_path: Path, busy: subprocess.Popen[str]
) -> None:
    model, batches = nn.Sequential(nn.Linear(3, 4)), [torch.ones(2, 3)] * 3
    with pytest.raises(HarvestError, match=f"is being harvested by process {busy.pid}. Wait"):
        comgra.harvest(model, batches, tmp_path / "h", select="0")
    busy.kill()
    busy.wait()
    assert (tmp_path / "h" / module.LOCK).exists()  # what a killed process leaves
    assert comgra.harvest(model, batches, tmp_path / "h", select="0").rows == 6
    assert not (tmp_path / "h" / module.LOCK).exists()


def test_a_lock_that_outlives_its_process_in_a_worker_is_no_lock(tmp_path: Path) -> None:
    model, batches = nn.Sequential(nn.Linear(3, 4)), [torch.ones(2, 3)]
    (tmp_path / "h").mkdir()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    note = {"pid": ended.pid, "host": socket.gethostname()}
    with taken_if_free(tmp_path / "h") as free:  # as a data loader's process holds it
        assert free
        (tmp_path / "h" / module.LOCK).write_text(json.dumps({**note, "host": "elsewhere"}))
        with pytest.raises(HarvestError, match=f"by process {ended.pid} on elsewhere"):
            comgra.harvest(model, batches, tmp_path / "h", select="0")
        (tmp_path / "h" / module.LOCK).write_text("{")
        with pytest.raises(HarvestError, match="by another process"):
            comgra.harvest(model, batches, tmp_path / "h", select="0")
        (tmp_path / "h" / module.LOCK).write_text(json.dumps(note))
        assert comgra.harvest(model, batches, tmp_path / "h", select="0").rows == 2


def test_a_harvest_that_cannot_begin_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(HarvestError, match="no batch"):
        comgra.harvest(nn.Sequential(nn.Linear(3, 4)), [], tmp_path / "a" / "h", select="0")
    assert not (tmp_path / "a" / "h").exists()
