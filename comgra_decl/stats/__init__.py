"""Statistics: tensors become raw sums (training thread), then records (writer thread)."""

from comgra_decl.stats.device import OVERWRITTEN
from comgra_decl.stats.finalise import finalise
from comgra_decl.stats.reducer import Reduced, Reducer
from comgra_decl.stats.support import CannotReduceError, dtype_name, to_numpy
from comgra_decl.stats.unusual import ordinary

__all__ = [
    "OVERWRITTEN",
    "CannotReduceError",
    "Reduced",
    "Reducer",
    "dtype_name",
    "finalise",
    "ordinary",
    "to_numpy",
]
