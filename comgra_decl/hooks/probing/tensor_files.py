"""Files of named tensors that a spec names: .npz and .safetensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from comgra_decl.errors import ProbeError, needed


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
