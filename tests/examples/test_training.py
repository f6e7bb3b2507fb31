"""The examples are plain training scripts that learn something."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.examples.conftest import EXAMPLES, SHORT, Train


def load(path: Path) -> ModuleType:
    """Imports an example's file without adding its folder to the path."""
    specification = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("example", SHORT)
def test_the_loss_falls(example: str, train: Train) -> None:
    losses = train(example).losses
    assert losses.isfinite().all()
    assert losses[-10:].mean() < 0.97 * losses[:5].mean()


@pytest.mark.parametrize("example", SHORT)
def test_the_final_loss_is_printed(example: str, train: Train) -> None:
    outcome = train(example)
    expected = outcome.losses[-50:].mean()
    assert f"final loss {expected:.4f}" in outcome.printed


def test_every_example_is_tested() -> None:
    assert {path.parent.name for path in EXAMPLES.glob("*/train.py")} == set(SHORT)


def test_no_example_has_heard_of_us() -> None:
    files = [path for path in EXAMPLES.glob("*/**/*") if path.suffix in {".py", ".yaml"}]
    assert len(files) >= 2 * len(SHORT)
    assert not [path for path in files if "comgra" in path.read_text().lower()]


def test_the_seeded_bug_squashes_negative_outputs_a_hundredfold() -> None:
    tutorial = load(EXAMPLES / "tutorial" / "train.py")
    torch.manual_seed(0)
    bugged = tutorial.Subnet(5, 30, 5, activation_on_last_layer=True)
    fixed = tutorial.Subnet(5, 30, 5, activation_on_last_layer=False)
    fixed.load_state_dict(bugged.state_dict())

    x = torch.randn(64, 5)
    wanted, squashed = fixed(x), bugged(x)
    assert (wanted < 0).any()
    assert (wanted > 0).any()
    torch.testing.assert_close(squashed, torch.where(wanted < 0, wanted / 100, wanted))


def test_targets_say_which_sums_are_positive() -> None:
    tutorial = load(EXAMPLES / "tutorial" / "train.py")
    inputs, targets = tutorial.make_batch(16, 7, torch.Generator().manual_seed(3))
    assert inputs.shape == (16, 7, 5)
    assert inputs.abs().max() <= 1
    for sequences, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
        sums = [sum(column) for column in zip(*sequences, strict=True)]
        assert answers == [float(total > 0) for total in sums]


def test_the_partial_sums_are_the_true_solution_and_change_nothing() -> None:
    tutorial = load(EXAMPLES / "tutorial" / "train.py")
    torch.manual_seed(0)
    model = tutorial.RunningSum(width=8, activation_on_last_layer=False)
    inputs, targets = tutorial.make_batch(16, 6, torch.Generator().manual_seed(1))

    seen: list[torch.Tensor] = []
    handle = model.partial_sums.register_forward_hook(lambda _m, _a, out: seen.append(out))
    with torch.no_grad():
        answers = model(inputs)
        handle.remove()
        model.partial_sums.forward = lambda sums, _x: sums + random.random()
        assert torch.equal(model(inputs), answers)
    torch.testing.assert_close(torch.stack(seen, dim=1), inputs.cumsum(dim=1))
    assert torch.equal((seen[-1] > 0).float(), targets)


def test_the_transformer_sees_no_future_character() -> None:
    characters = load(EXAMPLES / "characters" / "model.py")
    torch.manual_seed(0)
    model = characters.GPT(11, context=8, layers=2, heads=2, width=16, dropout=0.1).eval()
    symbols = torch.randint(11, (3, 8))
    changed = symbols.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11

    logits, others = model(symbols), model(changed)
    torch.testing.assert_close(logits[:, :5], others[:, :5])
    assert (logits[:, 5:] != others[:, 5:]).any(dim=-1).all()


def test_there_is_text_to_read_even_without_the_help_topics(tmp_path: Path) -> None:
    text = load(EXAMPLES / "characters" / "text.py")
    assert len(text.read_text()) > 20_000
    assert len(text.docstrings(*text.FALLBACK)) > 20_000
    own = tmp_path / "own.txt"
    own.write_text("ölfarbe", encoding="utf-8")
    assert text.read_text(str(own)) == "ölfarbe"
