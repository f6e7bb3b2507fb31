"""Put parameters and buffers into a copy of a model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import torch
from torch import nn

from comgra_decl.errors import CallError

_EXTRA_STATE = "_extra_state"
"""The end of the name of an entry in a state dict that is not a tensor of the model."""

_SHOWN = 5


def load(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy parameters and buffers into a module, in place.

    Args:
        module: the module, which has no wrapper.
        weights: tensors by name. Every parameter and every persistent buffer must be among them;
            buffers that are not persistent may be.

    Raises:
        CallError: a name or a shape does not fit; lists the first ones.
    """
    own = dict(
        chain(
            module.named_parameters(remove_duplicate=False),
            module.named_buffers(remove_duplicate=False),
        )
    )
    given = {name: t for name, t in weights.items() if not name.endswith(_EXTRA_STATE)}
    problems = [f"{name!r} is missing" for name in module.state_dict() if name not in given]
    problems = [each for each in problems if _EXTRA_STATE not in each]
    problems += [f"the model has no {name!r}" for name in given if name not in own]
    problems += [
        f"{name!r} has the shape {tuple(tensor.shape)}, but {tuple(own[name].shape)} in the model"
        for name, tensor in given.items()
        if name in own and tensor.shape != own[name].shape
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CallError(f"the weights do not fit the model: {'; '.join(problems[:_SHOWN])}{more}")
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)
