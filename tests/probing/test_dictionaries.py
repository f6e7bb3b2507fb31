"""Features of sparse autoencoders and transcoders: recorded, changed and swept as a module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import comgra_decl as comgra
from comgra_decl.errors import CallError, SpecError
from comgra_decl.query import Run
from tests.doors.test_look_generate import OUTPUTS, hooked, small

WIDTH, FEATURES, COUNT, LENGTH = 8, 20, 4, 5


class Net(nn.Module):
    """Blocks with a residual connection, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        mlps = (
            nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)) for _ in range(2)
        )
        self.mlps = nn.ModuleList(mlps)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for mlp in self.mlps:
            x = x + mlp(x)
        return self.head(x)[:, -1]


class Autoencoder(nn.Module):
    """A sparse autoencoder, with modules of its own."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.encoder, self.decoder = nn.Linear(WIDTH, FEATURES), nn.Linear(FEATURES, WIDTH)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x).relu()

    def decode(self, features: Tensor) -> Tensor:
        return self.decoder(features)


class Narrow(Autoencoder):
    """Its decoder returns too few values."""

    def decode(self, features: Tensor) -> Tensor:
        return self.decoder(features)[..., 1:]


def load(seed: int = 7) -> Autoencoder:
    return Autoencoder(seed)


def fails() -> Autoencoder:
    raise FileNotFoundError("sae.safetensors does not exist")


SAE = {"of": "eyes", "select": "mlps.1", "load": {"_target_": f"{__name__}.load", "seed": 3}}


def trained(
    root: Path, interventions: dict[str, Any] | None = None, **dictionaries: Any
) -> tuple[Run, list[Tensor]]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, labels = torch.randint(11, (COUNT, LENGTH)), torch.arange(COUNT) % 3
    spec: dict[str, Any] = {
        "nodes": {"all": {"select": "**", "capture": ["output"]}},
        "probes": {"eyes": {"samples": {"count": COUNT}, "schedule": {"every": 1}}},
        "dictionaries": dictionaries,
        "interventions": {k: {"of": "eyes", **each} for k, each in (interventions or {}).items()},
        "rules": "off",
    }
    with comgra.trace(spec, root=root) as session:
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), labels).backward()
            optimizer.step()
    assert session.path is not None
    return comgra.open_run(session.path), [p.detach().clone() for p in model.parameters()]


def model_at_the_start() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    model = Net()
    return model.eval(), torch.randint(11, (COUNT, LENGTH))


def value(run: Run, node: str, type_: str = "probe:eyes") -> Tensor:
    return torch.from_numpy(run.slot(node).value(0, type=type_))


@torch.no_grad()
def with_hook(change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the logits if a plain hook changes the second perceptron, given its input."""
    model, tokens = model_at_the_start()
    model.mlps[1].register_forward_hook(lambda _m, args, output: change(args[0], output))
    return model(tokens)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    one = {"feature": [4]}
    changes = {
        "without": {"select": "mlps.1.sae", "parts": one, "do": "zero"},
        "more": {"select": "mlps.1.sae", "parts": one, "do": {"add": 4.0}},
        "last": {"select": "mlps.1.sae", "parts": {"position": [-1]}, "do": {"scale": 2.0}},
        "bare": {"select": "mlps.1.bare", "parts": one, "do": "zero"},
        "coder": {"select": "mlps.1.coder", "parts": one, "do": {"add": 4.0}},
        "each": {"select": "mlps.1.sae", "do": "zero", "sweep": "feature", "measure": 1},
        "guess": {
            "select": "mlps.1.sae", "do": "zero", "sweep": "feature", "measure": 1,
            "estimate": "gradient",
        },
    }  # fmt: skip
    bare, coder = {**SAE, "keep_error": False}, {**SAE, "reads": "input"}
    root = tmp_path_factory.mktemp("runs")
    return trained(root, changes, sae=SAE, bare=bare, coder=coder)[0]


@pytest.mark.slow
def test_features_change_nothing_of_the_probe_and_of_the_training(run: Run, tmp_path: Path) -> None:
    plain, parameters = trained(tmp_path / "plain")
    described, same = trained(tmp_path / "described", sae=SAE)
    assert all(torch.equal(a, b) for a, b in zip(parameters, same, strict=True))
    for node in ("mlps.1", "head", "Net"):
        assert torch.equal(value(plain, node), value(described, node))
        assert torch.equal(value(plain, node), value(run, node))


@torch.no_grad()
def test_features_are_those_of_the_encoder(run: Run) -> None:
    sae = load(3)
    assert torch.equal(value(run, "mlps.1.sae"), sae.encode(value(run, "mlps.1")))
    assert value(run, "mlps.1.sae").shape == (COUNT, LENGTH, FEATURES)
    given: list[Tensor] = []

    def keep(x: Tensor, y: Tensor) -> Tensor:
        given.append(x)
        return y

    with_hook(keep)
    assert torch.equal(value(run, "mlps.1.coder"), sae.encode(given[0]))


def _without(features: Tensor) -> Tensor:
    new = features.clone()
    new[..., 4] = 0
    return new


def _more(features: Tensor) -> Tensor:
    new = features.clone()
    new[..., 4] += 4.0
    return new


def _last(features: Tensor) -> Tensor:
    new = features.clone()
    new[:, -1] *= 2.0
    return new


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "change"),
    [("without", _without), ("more", _more), ("last", _last), ("coder", _more)],
)
def test_a_changed_feature_changes_what_is_decoded_and_the_error_stays(
    run: Run, name: str, change: Callable[[Tensor], Tensor]
) -> None:
    sae = load(3)

    def changed(x: Tensor, y: Tensor) -> Tensor:
        features = sae.encode(x if name == "coder" else y)
        return y + (sae.decode(change(features)) - sae.decode(features))

    logits = with_hook(changed)
    assert torch.equal(value(run, "Net", f"intervention:{name}"), logits)
    assert not torch.equal(logits, value(run, "Net"))


@torch.no_grad()
def test_without_the_error_the_output_is_what_is_decoded(run: Run) -> None:
    sae = load(3)
    logits = with_hook(lambda _x, y: sae.decode(_without(sae.encode(y))))
    assert torch.equal(value(run, "Net", "intervention:bare"), logits)


def test_effects_of_all_features_are_those_of_one_hook_after_the_other(run: Run) -> None:
    sae, clean = load(3), value(run, "Net")[:, 1]
    found = run.effects("each", 0)["mean"]
    with torch.no_grad():
        for number in range(FEATURES):

            def ablated(_x: Tensor, y: Tensor, number: int = number) -> Tensor:
                features = sae.encode(y)
                new = features.clone()
                new[..., number] = 0
                return y + (sae.decode(new) - sae.decode(features))

            effect = (with_hook(ablated)[:, 1] - clean).mean()
            assert found.iloc[number] == pytest.approx(float(effect), abs=1e-6)
    # the head is linear, so the estimate is exact
    assert np.allclose(run.effects("guess", 0)["mean"], found, atol=1e-6)
    assert found.abs().max() > 0.01


def test_the_top_samples_of_a_feature_are_those_with_its_largest_values(run: Run) -> None:
    found = run.picture("top_samples", 0, "mlps.1.sae")
    largest = value(run, "mlps.1.sae").amax(1).numpy()  # [samples, features]
    expected = np.sort(largest, axis=0)[::-1].T
    np.testing.assert_array_equal(found.values[..., 1], expected)


# -- one call ----------------------------------------------------------------------------------


@torch.no_grad()
def test_look_records_and_changes_features() -> None:
    model, tokens = model_at_the_start()
    sae = load(3)
    described = {"sae": {"select": "mlps.1", "module": sae}}
    found = comgra.look(model, tokens, dictionaries=described)
    features = torch.from_numpy(found.slot("mlps.1.sae").value(0, type="eval"))
    assert torch.equal(features, sae.encode(value(found, "mlps.1", "eval")))
    assert torch.equal(value(found, "Net", "eval"), model(tokens))
    change = {"select": "mlps.1.sae", "parts": {"feature": [4]}, "do": {"add": 4.0}}
    steered = comgra.look(model, tokens, dictionaries=described, changes=change)

    def changed(_x: Tensor, y: Tensor) -> Tensor:
        return y + (sae.decode(_more(sae.encode(y))) - sae.decode(sae.encode(y)))

    assert torch.equal(value(steered, "Net", "eval"), with_hook(changed))
    assert not [node for node in found.nodes if "coder" in node]
    assert not hasattr(model.mlps[1], "sae")


@torch.no_grad()
def test_features_are_steered_while_a_model_generates() -> None:
    model, tokens = small()
    torch.manual_seed(1)
    encoder, decoder = nn.Linear(16, FEATURES), nn.Linear(FEATURES, 16)
    sae = SimpleNamespace(encode=lambda x: encoder(x).relu(), decode=decoder)
    described = {"sae": {"select": "blocks.0", "module": sae}}
    change = {"select": "blocks.0.sae", "parts": {"feature": [4]}, "do": {"add": 30.0}}
    how: dict[str, Any] = {"spec": OUTPUTS, "call": "generate", "dictionaries": described}
    plain = comgra.look(model, tokens, **how)
    steered = comgra.look(model, tokens, changes=change, **how)

    def steer(y: Tensor, _: int) -> Tensor:
        features = sae.encode(y)
        new = features.clone()
        new[..., 4] += 30.0
        return y + (sae.decode(new) - sae.decode(features))

    expected = model.generate(tokens)
    assert torch.equal(plain.output, expected)
    with hooked(model.get_submodule("blocks.0"), steer):
        assert torch.equal(steered.output, model.generate(tokens))
    assert not torch.equal(steered.output, expected)
    assert plain.sequence("blocks.0.sae").shape == (3, 10, FEATURES)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"sae": {"select": "mlps.*", "module": Autoencoder()}}, "must select a single module"),
        ({"sae": {"select": "mlp.1", "module": Autoencoder()}}, "'mlp.1' matches no"),
        ({"sae": {"select": "mlps.1", "module": nn.Linear(2, 2)}}, "Linear has no method encode"),
        ({"sae": {"select": "mlps.1"}}, "with the key 'module'"),
        ({"sae": {"select": "mlps.1", "module": Autoencoder(), "read": "input"}}, "read: Extra"),
        ({"training": {"select": "mlps.1", "module": Autoencoder()}}, "use another name"),
        ({"sae": {"select": "mlps.1", "module": Autoencoder(), "role": "output[1]"}}, "no tensor"),
    ],
)
def test_a_dictionary_that_does_not_fit_is_refused(described: dict[str, Any], message: str) -> None:
    model, tokens = model_at_the_start()
    with pytest.raises((CallError, SpecError), match=message):
        comgra.look(model, tokens, dictionaries=described)


def test_a_decoder_of_another_width_is_refused() -> None:
    model, tokens = model_at_the_start()
    described = {"sae": {"select": "mlps.1", "module": Narrow(), "keep_error": False}}
    change = {"select": "mlps.1.sae", "do": "zero"}
    with pytest.raises(CallError, match=r"decode must return a tensor of shape \[4, 5, 8\]"):
        comgra.look(model, tokens, dictionaries=described, changes=change)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"select": "mlps.7"}, "comgra.dictionaries.sae.select: 'mlps.7' matches no"),
        ({"load": {"_target_": f"{__name__}.fails"}}, "sae.safetensors does not exist"),
    ],
)
def test_a_program_ends_before_training_if_a_dictionary_is_missing(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        trained(tmp_path, sae={**SAE, **keys})


def test_a_dictionary_belongs_to_a_probe(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"dictionaries.sae.of: there is no probe 'ears' \(eyes\)"):
        trained(tmp_path, sae={**SAE, "of": "ears"})


class InPlace(Autoencoder):
    """Its methods write to what they receive."""

    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x.mul_(2))

    def decode(self, features: Tensor) -> Tensor:
        return super().decode(features.mul_(3))


def in_place() -> InPlace:
    return InPlace()


def test_a_dictionary_that_writes_to_its_argument_changes_nothing(tmp_path: Path) -> None:
    model, tokens = model_at_the_start()
    plain = comgra.look(model, tokens)
    described = {"sae": {"select": "mlps.1", "module": in_place()}}
    found = comgra.look(model, tokens, dictionaries=described)
    expected = in_place().encode(torch.from_numpy(plain.slot("mlps.1").value(0))).detach().numpy()
    np.testing.assert_array_equal(found.slot("mlps.1.sae").value(0), expected)
    sae = {**SAE, "load": {"_target_": f"{__name__}.in_place"}}
    run, _ = trained(tmp_path / "with", sae=sae)
    other, _ = trained(tmp_path / "without")
    for node in ("mlps.1", "head"):
        np.testing.assert_array_equal(
            found.slot(node).value(0), plain.slot(node).value(0), err_msg=node
        )
        assert torch.equal(value(run, node), value(other, node)), node


class Wrong(Autoencoder):
    """Returns a pair instead of features."""

    def encode(self, x: Tensor) -> Any:
        return x, x


@pytest.mark.parametrize(
    ("dictionary", "message"),
    [
        (Autoencoder, "Autoencoder is a class; pass an object of it"),
        (Autoencoder().double(), r"mlps.1.sae: encode of Autoencoder fails with a tensor of shape"),
        (Wrong(), "mlps.1.sae: encode of Wrong must return a tensor, got tuple"),
    ],
)
def test_a_dictionary_that_does_not_fit_says_so_in_a_look(dictionary: Any, message: str) -> None:
    model, tokens = model_at_the_start()
    described = {"sae": {"select": "mlps.1", "module": dictionary}}
    with pytest.raises((CallError, SpecError), match=message):
        comgra.look(model, tokens, dictionaries=described)


def test_a_dictionary_of_another_width_names_both() -> None:
    model, tokens = model_at_the_start()
    described = {"sae": {"select": "mlps.1.0", "module": Autoencoder()}}
    with pytest.raises(CallError, match=r"shape \[4, 5, 16\] and torch.float32: .*mat1 and mat2"):
        comgra.look(model, tokens, dictionaries=described)
