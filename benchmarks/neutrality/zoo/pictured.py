"""Training runs that are probed with every picture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.neutrality.program import Program, usual
from benchmarks.neutrality.zoo.collection import Collection

PICTURED = Collection()
_BATCH, _TOKENS, _LENGTH, _WIDTH = 6, 11, 5, 8

Pictures = dict[str, dict[str, Any]]

_EVERY_MODEL: Pictures = {
    "saliency": {},
    "input_x_gradient": {},
    "integrated_gradients": {"points": 3},
    "hessian": {"points": 4},
    "loss_slice": {"points": 3},
}
_OF_IMAGES: Pictures = {
    "grad_cam": {"select": {"class": "Conv2d"}},
    "guided_grad_cam": {"select": {"class": "Conv2d"}},
    "guided_backprop": {},
    "occlusion": {"window": [4, 4], "stride": 4},
    "maximise": {"select": "0", "points": 3, "units": [0]},
}
_OF_WORDS: Pictures = {
    "occlusion": {"window": [2]},
    "attention_rollout": {},
    "logit_lens": {},
}


def _probed(program: Program, pictures: Pictures, *, explains: dict[str, Any]) -> Program:
    """Probe a program at every third record, in training mode; pictures have the method's name."""
    own = {"of": "eyes", **explains}
    whole = ("attention_rollout", "logit_lens", "hessian", "loss_slice", "maximise")
    program.spec = {
        "probes": {"eyes": {"samples": {"count": 4}, "mode": "train", "schedule": {"every": 3}}},
        "pictures": {
            name: {"method": name, **({"of": "eyes"} if name in whole else own), **keys}
            for name, keys in pictures.items()
        },
    }
    return program


@PICTURED
def pictured_images() -> Program:
    """Pictures of a CNN with batch norm, dropout, ReLU in place, and a hook of the program."""
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
    end = [nn.Dropout(0.2), nn.Conv2d(4, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, *end, nn.Linear(3, 4))
    model[0].register_forward_hook(lambda _m, _a, out: out * 1.1)

    def loss(net: nn.Module) -> Tensor:
        return F.cross_entropy(net(torch.randn(_BATCH, 2, 8, 8)), torch.randint(4, (_BATCH,)))

    pictures = {**_EVERY_MODEL, **_OF_IMAGES}
    return _probed(usual(model, loss), pictures, explains={"target": "label"})


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_TOKENS, _WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, 2, 16, dropout=0.2, batch_first=True)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


@PICTURED
def pictured_words() -> Program:
    """Pictures of a transformer with dropout."""

    def loss(net: nn.Module) -> Tensor:
        tokens = torch.randint(_TOKENS, (_BATCH, _LENGTH))
        return F.cross_entropy(net(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())

    pictures = {**_EVERY_MODEL, **_OF_WORDS}
    return _probed(usual(_Words(), loss), pictures, explains={"target": {"token": "top"}})
