"""List the parameters and buffers of a model, and load others from a file and into a copy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

from comgra_decl.errors import CallError, ProbeError, needed

EXTRA_STATE = "_extra_state"
"""The end of the name of an entry in a state dict that is not a tensor of the model."""

_SHOWN = 5

_WRAPPERS = re.compile(r"(_orig_mod\.|module\.)+")
"""What `torch.compile` and DistributedDataParallel prepend to the names in a state dict."""


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield (name, tensor, whether it persists) for all parameters and buffers.

    The persistent ones have the names and the order of a state dict. A tensor with several names is
    yielded with each of them. No method of the program is called.
    """
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter, True
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield prefix + name, buffer, name not in part._non_persistent_buffers_set


def tensors_in_file(name: str) -> dict[str, torch.Tensor]:
    """Return the tensors in a file by name, on the CPU.

    Raises:
        ProbeError: the file cannot be read.
        MissingPackageError: safetensors is not installed.
    """
    if name.endswith(".safetensors"):
        library = needed("safetensors.torch", "safetensors")
        try:
            found: dict[str, torch.Tensor] = library.load_file(name)
        except Exception as error:  # of a class of its own
            raise ProbeError(f"{name} cannot be read as a .safetensors file: {error}") from None
        return found
    try:
        with np.load(Path(name), allow_pickle=False) as archive:
            return {key: torch.from_numpy(np.ascontiguousarray(archive[key])) for key in archive}
    except Exception as error:  # also of the zip and zlib modules
        raise ProbeError(f"{name} cannot be read as a .npz file: {error}") from None


def load(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy parameters and buffers into a module, in place.

    Args:
        module: the module, which has no wrapper.
        weights: tensors by name, or by the name that they have in a wrapper. Every parameter and
            every persistent buffer must be among them; buffers that are not persistent may be.

    Raises:
        CallError: a name or a shape does not fit; lists the first ones.
    """
    found = list(named_tensors(module))
    own = {name: tensor for name, tensor, _ in found}
    given = {name: t for name, t in weights.items() if not name.endswith(EXTRA_STATE)}
    if not given.keys() <= own.keys():
        bare = {_WRAPPERS.sub("", name, 1): t for name, t in given.items() if _WRAPPERS.match(name)}
        lasting = {name for name, _, lasting in found if lasting}
        # entries without the prefix are the wrapper's own, such as the counter of AveragedModel
        given = bare if lasting <= bare.keys() <= own.keys() else given
    problems = [
        f"{name!r} is missing" for name, _, lasting in found if lasting and name not in given
    ]
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
