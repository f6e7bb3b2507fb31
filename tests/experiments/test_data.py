"""Batches are shown as the model receives them, and the program does not train."""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from comgra_decl.cli.main import main
from comgra_decl.experiments.data import Drawn, drawing
from comgra_decl.experiments.data_page import page, png
from comgra_decl.query.batches import summary
from tests.support.programs import interpreter_kept

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
CLASSES = torch.tensor([0, 1, 2, 1, 0, 2, 2, 2])


class EnoughError(Exception):
    """Ends a program."""


def images() -> Tensor:
    torch.manual_seed(0)
    drawn = torch.rand(8, 3, 6, 6)
    drawn[3] = drawn[2]  # twice in the first batch
    drawn[6] = drawn[0]  # again in the second one
    shift, scale = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    return (drawn - shift) / scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(108, 3)

    def forward(self, pixels: Tensor, *, scale: Tensor | None = None) -> Tensor:
        out: Tensor = self.last(pixels.flatten(1))
        return out if scale is None else out * scale


def drawn_from(program: Callable[[], None]) -> Drawn:
    """Return the first two batches of a program."""
    found = Drawn()
    with drawing(found, 2, EnoughError), pytest.raises(EnoughError):
        program()
    return found


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    """Two batches of a program whose parameters must not change."""
    model = Model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    loss, loader = nn.CrossEntropyLoss(), DataLoader(TensorDataset(images(), CLASSES), batch_size=4)

    def program() -> None:
        for _ in range(9):
            for pixels, classes in loader:
                optimizer.zero_grad()
                loss(model(pixels, scale=torch.ones(3)), classes).backward()
                optimizer.step()

    found = drawn_from(program)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not nn.modules.module._global_forward_hooks
    return found


def test_inputs_and_targets_are_named_and_equal_those_of_the_program(drawn: Drawn) -> None:
    assert [*drawn.tensors] == ["input pixels", "input scale", "target of cross_entropy"]
    assert drawn.batches == 2
    assert drawn.skipped == 1
    assert drawn.target == "target of cross_entropy"
    pixels = images().numpy()
    for number, batch in enumerate(drawn.tensors["input pixels"]):
        np.testing.assert_array_equal(batch, pixels[4 * number : 4 * number + 4])
    np.testing.assert_array_equal(np.concatenate(drawn.tensors["target of cross_entropy"]), CLASSES)


def test_numbers_are_those_of_numpy(drawn: Drawn) -> None:
    found, pixels = summary("x", drawn.tensors["input pixels"]), images().double().numpy()
    assert found.shapes == [[4, 3, 6, 6]]
    assert found.dtype == "float32"
    assert [found.low, found.high] == [pixels.min(), pixels.max()]
    assert [found.mean, found.std] == pytest.approx([pixels.mean(), pixels.std()])
    expected = [(pixels[:, c].mean(), pixels[:, c].std()) for c in range(3)]
    assert np.array(found.channels) == pytest.approx(np.array(expected))
    assert (found.repeated, found.shared, found.samples) == (1, 1, 8)
    assert found.classes == {}


@pytest.mark.parametrize("channels", [2, 5, 6])
@pytest.mark.parametrize("width", [4, 3])
def test_channels_of_a_convolution_are_second(channels: int, width: int) -> None:
    torch.manual_seed(0)
    images = torch.randn(24, channels, 8, width) + torch.arange(channels).view(-1, 1, 1) * 10
    model = nn.Sequential(nn.Conv2d(channels, 2, 3), nn.Flatten(), nn.LazyLinear(1))
    model(images)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def program() -> None:
        for batch in images.split(12):
            model(batch).square().mean().backward()
            optimizer.step()

    found = drawn_from(program)
    ((label, batches),) = found.tensors.items()
    means = [
        mean for mean, _ in summary(label, batches, convolved=label in found.convolved).channels
    ]
    assert means == pytest.approx(images.mean((0, 2, 3)).tolist(), rel=1e-5)


def test_channels_are_last_if_only_the_last_axis_can_be_one() -> None:
    last = np.random.default_rng(0).random((12, 8, 6, 3))
    assert np.array(summary("x", [last]).channels)[:, 0] == pytest.approx(last.mean((0, 1, 2)))
    second = last.reshape(12, 6, 6, 4)
    assert len(summary("x", [second]).channels) == 4
    assert len(summary("x", [last.reshape(12, 6, 8, 3)[:, :, :3]]).channels) == 6


@pytest.mark.parametrize("kind", [np.uint8, np.int64])
def test_images_of_integers_have_channels_and_no_list_of_values(
    kind: type[np.integer[Any]],
) -> None:
    pixels = np.random.default_rng(0).integers(0, 250, (6, 7, 9, 3)).astype(kind)
    pixels[..., 1] //= 5
    found = summary("x", [pixels])
    expected = [(pixels[..., c].mean(), pixels[..., c].std()) for c in range(3)]
    assert np.array(found.channels) == pytest.approx(np.array(expected))
    assert found.classes == {}
    masks = pixels[..., :1] % 4
    assert summary("x", [masks]).classes == {n: int((masks == n).sum()) for n in range(4)}


def test_columns_of_integers_are_counted_and_no_channels() -> None:
    tokens = np.random.default_rng(0).integers(0, 90, (30, 12))
    found = summary("x", [tokens])
    assert found.channels == []
    assert len(found.classes) == len(np.unique(tokens)) > 80


def test_classes_are_counted(drawn: Drawn) -> None:
    found = summary("y", drawn.tensors["target of cross_entropy"])
    assert found.classes == {0: 2, 1: 2, 2: 4}
    assert found.fewest == 2  # the second batch has no class 1
    assert (found.repeated, found.shared) == (0, 0)  # classes are no samples


def test_values_that_are_not_finite_are_counted_and_left_out() -> None:
    batch = np.array([[1.0, np.nan], [np.inf, 3.0]], np.float32)
    found = summary("x", [batch])
    assert (found.nonfinite, found.low, found.high, found.mean) == (2, 1.0, 3.0, 2.0)


def test_the_page_says_how_many_values_are_not_finite() -> None:
    model = nn.Linear(2, 1)
    empty, partly = torch.full((4, 2), math.nan), torch.ones(4, 2)
    partly[0] = math.inf

    def rows(x: Tensor) -> str:
        def program() -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(4):
                model(x).sum().backward()
                optimizer.step()

        return page(drawn_from(program))

    assert "all NaN or infinite" in rows(empty)
    assert "1 to 1, 4 NaN or infinite" in rows(partly)


def test_without_a_loss_function_the_target_is_unknown() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))

    def program() -> None:
        for x, y in DataLoader(data, batch_size=4):
            (model(x) - y).square().mean().backward()
            optimizer.step()

    found = drawn_from(program)
    assert [*found.tensors] == ["input input", "batch[1] (not passed to the model)"]
    assert found.target is None
    np.testing.assert_array_equal(
        np.concatenate(found.tensors["batch[1] (not passed to the model)"]), data.tensors[1]
    )


def test_accumulated_batches_are_drawn_in_one_step() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def program() -> None:
        for _ in range(3):
            model(torch.ones(4, 2)).sum().backward()
        optimizer.step()

    found = drawn_from(program)
    assert found.batches == 2
    assert found.skipped == 0


def pixels_of(file: bytes) -> tuple[tuple[int, ...], bytes]:
    """Decode a PNG file without filters, with zlib only."""
    size = struct.unpack(">2I", file[16:24])
    start = file.index(b"IDAT") + 4
    length = struct.unpack(">I", file[start - 8 : start - 4])[0]
    rows = zlib.decompress(file[start : start + length])
    width = len(rows) // size[1]
    return size, b"".join(rows[i * width + 1 : (i + 1) * width] for i in range(size[1]))


def test_the_page_shows_images_with_the_normalization_undone(drawn: Drawn) -> None:
    text = page(drawn, mean=MEAN, std=STD)
    sources = re.findall(r"base64,([^']+)'><br>(\d+)<", text)
    assert [int(name) for _, name in sources] == [0, 1, 2, 1]
    torch.manual_seed(0)
    original = (torch.rand(8, 3, 6, 6)[0].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
    size, content = pixels_of(base64.b64decode(sources[0][0]))
    assert size == (6, 6)
    shown = np.frombuffer(content, np.uint8).reshape(6, 6, 3)
    assert np.abs(shown.astype(int) - original).max() <= 1
    assert "because no mean and standard deviation were given" in page(drawn)
    misfit = page(drawn, mean=MEAN[:2], std=STD[:2])
    assert "because the images have 3 channels and the mean 2" in misfit
    assert "http" not in text.replace("https://", "http://")


def test_a_png_is_valid() -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4, 1)
    assert pixels_of(png(pixels)) == ((4, 3), pixels.tobytes())


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(50):
    x, y = torch.randn(6, 3), torch.full((6,), step % 2)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
raise AssertionError("the program was not ended")
"""


def test_the_command_prints_text_json_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)

    def printed(*arguments: str, code: int = 0) -> Any:
        ended = 0
        try:
            with interpreter_kept():
                main(["data", *arguments])
        except SystemExit as end:
            ended = int(end.code or 0)
        assert ended == code
        return capsys.readouterr()

    text = printed("--page", "data.html", "train.py").out
    assert "4 batches" in text
    assert "input input: 6\u00d73, float32" in text
    assert "2 different values (0: 12, 1: 12)" in text
    assert "the data may not be shuffled" in text
    assert "target of cross_entropy" in (tmp_path / "data.html").read_text()
    content = json.loads(printed("--json", "--batches", "2", "train.py").out)
    assert content["batches"] == 2
    assert content["target"] == "target of cross_entropy"
    assert "must be numbers" in printed("--mean", "a", "train.py", code=2).err
    assert "one number per channel" in printed("--mean", "1,2", "train.py", code=2).err
    zero = printed("--mean", "1,2", "--std", "0,1", "train.py", code=2).err
    assert "--std must be positive, got '0,1'" in zero
    single = printed("--batches", "1", "train.py").out
    assert single.startswith("1 batch\n")
    assert "1 value (0: 6)" in single


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("nowhere/x.html", "the folder 'nowhere' does not exist"),
        ("train.py/x.html", "is not a folder"),
        (".", "is a folder, not a file"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_the_script_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    page: str,
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    with pytest.raises(SystemExit) as ended:
        main(["data", "--page", page, "train.py"])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_the_page_is_written_where_the_command_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "away").mkdir()
    (tmp_path / "train.py").write_text("import os; os.chdir('away')\n" + SCRIPT)
    with interpreter_kept():
        main(["data", "--page", "data.html", "train.py"])
    assert (tmp_path / "data.html").exists()
    assert [*(tmp_path / "away").iterdir()] == []
