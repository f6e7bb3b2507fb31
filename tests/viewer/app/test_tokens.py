"""Ids in inputs are shown as the tokens that the spec declares, wherever they appear."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bokeh.models import ColumnDataSource
from torch import nn

import comgra_decl as comgra
from comgra_decl.errors import SpecError
from comgra_decl.query import Run
from comgra_decl.record.token_file import read_tokens
from comgra_decl.viewer.model.attention import tokens
from comgra_decl.viewer.model.drawing import place_of
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.sheet import slot_of
from comgra_decl.viewer.model.tokens import has_tokens, joined, label
from comgra_decl.viewer.model.values import values_picture
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.sheet import SheetPane
from comgra_decl.viewer.panes.values import ValuesPane
from tests.support.traced import traced

ALPHABET = "\n abcdefghijklmnopqrstuvwxyz"
TEXTS = ("the cat", "sat\non ", "zebras ")
NODES = {"all": {"select": "**", "capture": ["input", "output"], "values": True}}


def ids_of(text: str) -> list[int]:
    return [ALPHABET.index(letter) for letter in text]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET) + 1, 4)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.embed(ids) * attention_mask[..., None]


def recorded(root: Path, declared: Mapping[str, Any] | None) -> Run:
    model, ids = Reader(), torch.tensor([*map(ids_of, TEXTS)])
    ids[2, -1] = len(ALPHABET)  # has no token

    def training() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        model(ids, attention_mask=torch.ones_like(ids)).square().mean().backward()
        optimizer.step()

    return traced(root / "runs", NODES, training, tokens=declared)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return recorded(tmp_path_factory.mktemp("letters"), {"alphabet": ALPHABET})


def shown_at(run: Run, **fields: Any) -> Shown:
    view = RunView(run)
    at = Selection(step=0, node="input", role="input", statistic="mean", **fields)
    return Shown(view, at, "kind", "linear", None, False)


def test_only_inputs_of_ids_have_tokens(run: Run) -> None:
    view = RunView(run)
    spelled = {(s.node, s.role) for s in view.slots.values() if has_tokens(view, s)}
    assert spelled == {("input", "input"), ("embed", "input")}
    whole = {(s.node, s.role) for s in view.slots.values() if s.dtype == "int64"}
    assert ("input", "input.attention_mask") in whole


def test_values_are_drawn_as_tokens_and_unknown_ids_as_numbers(run: Run) -> None:
    shown = shown_at(run)
    slot = slot_of(shown.view, shown.at, "forward")
    drawing = values_picture(shown.view, slot, shown.at).drawing
    assert drawing.words is not None
    rows = ["".join(row) for row in drawing.words.tolist()]
    assert rows == ["the\u2423cat", "sat\u23ceon\u2423", f"zebras{len(ALPHABET)}"]
    np.testing.assert_array_equal(drawing.image[0], ids_of(TEXTS[0]))
    assert place_of(drawing)["words"] == drawing.words.ravel().tolist()
    one = values_picture(shown.view, slot, shown_at(run, batch="1").at).drawing
    assert one.words is not None
    assert one.words.shape == (1, len(TEXTS[1]))


def test_the_figure_and_the_table_of_values_contain_the_tokens(run: Run) -> None:
    pane = ValuesPane(lambda **_: None, place=0)
    pane.refresh(shown_at(run))
    sources: Any = pane.frame.figure.select({"type": ColumnDataSource})
    texts = [source.data.get("text", []) for source in sources]
    assert [*"the\u2423cat"] in [words[: len(TEXTS[0])] for words in texts]
    sheet = SheetPane(lambda **_: None)
    sheet.refresh(shown_at(run, batch="0"))
    assert "the cat</pre>" in sheet.view.html
    assert f"{ALPHABET.index('c')} <small>c</small>" in sheet.view.html


def test_attention_is_labelled_with_the_tokens(run: Run) -> None:
    shown = shown_at(run)
    assert "".join(tokens(shown.view, shown.at, 0, len(TEXTS[0]))) == "the\u2423cat"


def test_without_a_declaration_the_ids_are_shown(tmp_path: Path) -> None:
    run = recorded(tmp_path, None)
    shown = shown_at(run)
    slot = slot_of(shown.view, shown.at, "forward")
    assert run.tokens == ()
    assert values_picture(shown.view, slot, shown.at).drawing.words is None
    assert tokens(shown.view, shown.at, 0, len(TEXTS[0])) == tuple(map(str, ids_of(TEXTS[0])))


def test_the_tokens_of_a_file_are_stored_in_the_run(tmp_path: Path) -> None:
    file = tmp_path / "vocab.txt"
    file.write_text("".join(f"word{i}\n" for i in range(40)))
    run = recorded(tmp_path, {"file": str(file)})
    file.unlink()
    assert run.tokens == tuple(f"word{i}" for i in range(40))


def test_a_file_that_cannot_be_read_is_a_mistake_in_the_spec(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"comgra\.tokens\.file: .*cannot be read"):
        comgra.trace({"tokens": {"file": str(tmp_path / "none.json")}}).__enter__()
    (tmp_path / "none.json").write_text('{"a": "b"}')
    with pytest.raises(SpecError, match="contains no tokens with ids"):
        read_tokens(str(tmp_path / "none.json"))
    with pytest.raises(SpecError, match="either 'alphabet' or 'file'"):
        comgra.trace({"tokens": {}}).__enter__()


FORMS = {
    "list.json": ["a", "b"],
    "vocab.json": {"b": 1, "a": 0},
    "bpe.json": {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}},
    "unigram.json": {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}},
}


@pytest.mark.parametrize("name", FORMS)
def test_all_forms_of_a_vocabulary_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(json.dumps(FORMS[name]))
    assert read_tokens(str(tmp_path / name)) == ["a", "b"]


def test_tokens_of_bytes_and_pieces_become_text(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    text = "caf\u00e9 or na\u00efve \u00fcber"
    tokenizer.train_from_iterator([text] * 5, vocab_size=300, min_frequency=2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = read_tokens(str(tmp_path / "tokenizer.json"))
    encoded = tokenizer.encode(text).ids
    assert joined(words[i] for i in encoded) == tokenizer.decode(encoded) == text


def test_tokens_are_joined_as_they_were_split() -> None:
    assert joined(["un", "clear", "signs"]) == "un clear signs"
    assert joined(["a", " ", "b"]) == "a b"
    assert joined(["two", " words"]) == "two words"
    assert [label(word) for word in (" ", "\n", "\u202eab", " the")] == [
        "\u2423", "\u23ce", "\\u202eab", " the",
    ]  # fmt: skip


def test_numbers_of_tokens_are_apart_even_if_each_has_one_digit() -> None:
    assert joined(["0", "4", "1"]) == "0 4 1"
    assert joined(["a", "4", "c"]) == "a4c"
    assert joined(["9", "10"]) == "9 10"
