"""Statistics: tensors to raw sums on the training thread, raw sums to records on the writer's."""

from comgra_decl.stats.finalise import finalise
from comgra_decl.stats.reducer import Reduced, Reducer
from comgra_decl.stats.support import CannotReduceError, dtype_name, to_numpy

__all__ = ["CannotReduceError", "Reduced", "Reducer", "dtype_name", "finalise", "to_numpy"]
