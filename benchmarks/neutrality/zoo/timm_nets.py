"""Models from the timm library on small images."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.neutrality.program import Program, usual
from benchmarks.neutrality.zoo import kernels

kernels.declare_missing()

import timm  # noqa: E402 - needs torchvision to be importable

NAMES = """
convit_tiny crossvit_tiny_240 deit_tiny_patch16_224 edgenext_xx_small efficientvit_b0
ghostnet_050 gmixer_12_224 lcnet_035 levit_128s mixer_s32_224 mobilenetv3_small_050
mobilenetv4_conv_small_035 mobilevit_xxs pit_ti_224 poolformer_s12 repvgg_a0 resmlp_12_224
resnet10t resnetv2_18 starnet_s1 vit_tiny_patch16_224 xcit_nano_12_p16_224
""".split()

_SIZES = (64, 96, 128, 224, 256)
_SMALL = {"num_classes": 7, "pretrained": False}
_SHALLOW: tuple[dict[str, int], ...] = (
    {"img_size": 64, "depth": 2},
    {"depth": 2},
    {"img_size": 64},
    {},
)


def build(name: str) -> Program:
    """Return a training run of a classifier on random images."""
    torch.manual_seed(0)
    model, size = smallest(name)
    torch.manual_seed(0)

    def loss(net: nn.Module) -> Tensor:
        logits = net(torch.randn(2, 3, size, size))
        if isinstance(logits, (tuple, list)):
            logits = logits[0]
        return F.cross_entropy(logits, torch.randint(7, (2,)))

    return usual(model, loss, optimizer=torch.optim.SGD, momentum=0.9)


def smallest(name: str) -> tuple[nn.Module, int]:
    """Return the model for the smallest images that it accepts."""
    options, size = _found(name)
    return timm.create_model(name, **_SMALL, **options), size


@cache
def _found(name: str) -> tuple[dict[str, int], int]:
    """Find the options and image size once, so that no traced program has to try out models."""
    for options in _SHALLOW:
        try:
            model = timm.create_model(name, **_SMALL, **options)
        except (TypeError, AssertionError, ValueError, RuntimeError):
            continue
        for size in _SIZES:
            try:
                model.eval()
                with torch.no_grad():
                    model(torch.zeros(1, 3, size, size))
            except (RuntimeError, AssertionError, ValueError):
                continue
            return options, size
    raise ValueError(f"no small images fit {name}")
