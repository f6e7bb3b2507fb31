"""Models from torchvision on small images and videos."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.neutrality.program import Program, usual
from benchmarks.neutrality.zoo import kernels

kernels.declare_missing()

from torchvision import models  # noqa: E402 - requires the declared operators

NAMES = """
densenet121 googlenet mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_y_400mf resnet18
shufflenet_v2_x0_5 squeezenet1_1 lraspp_mobilenet_v3_large raft_small
""".split()

SIDE = {"inception_v3": 96, "maxvit_t": 224, "vit_b_32": 224, "alexnet": 96, "raft_small": 128}
OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"init_weights": False},
    "inception_v3": {"init_weights": False, "aux_logits": False},
}
VIDEOS = {"mc3_18": 4, "r3d_18": 4, "r2plus1d_18": 4, "s3d": 16, "swin3d_t": 4}
MAPS = {"deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large"}


def build(name: str) -> Program:
    """Return a training run with random images, videos or pairs of images."""
    side = SIDE.get(name, 64)
    if name == "raft_small":
        return usual(models.get_model(name, weights=None), _flow, optimizer=torch.optim.SGD)
    backbone = {"weights_backbone": None} if name in MAPS else {}
    model = models.get_model(name, weights=None, num_classes=7, **backbone, **OPTIONS.get(name, {}))

    def loss(net: nn.Module) -> Tensor:
        frames = (VIDEOS[name],) if name in VIDEOS else ()
        output = net(torch.randn(2, 3, *frames, side, side))
        if name in MAPS:
            return F.cross_entropy(output["out"], torch.randint(7, (2, side, side)))
        target = torch.randint(7, (2,))
        if isinstance(output, tuple):
            return torch.stack([F.cross_entropy(logits, target) for logits in output]).sum()
        return F.cross_entropy(output, target)

    return usual(model, loss, optimizer=torch.optim.SGD, momentum=0.9)


def _flow(net: nn.Module) -> Tensor:
    side = SIDE["raft_small"]
    flows = net(torch.rand(1, 3, side, side), torch.rand(1, 3, side, side), num_flow_updates=2)
    return torch.stack([flow.abs().mean() for flow in flows]).sum()
