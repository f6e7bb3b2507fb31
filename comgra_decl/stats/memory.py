"""Memory for results, handed out again once nobody uses it.

The system hands out large arrays page by page as they are written to, which costs several times
what writing the numbers does (5 MB: 9 ms instead of 1 ms on a virtual machine).
"""

from __future__ import annotations

from collections import deque
from sys import getrefcount
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MOST = 8
"""Arrays remembered; forms of a step that do not come back give theirs up."""
_UNUSED = 3
"""References to an array that only `Memory` knows: the deque's, the loop's, `getrefcount`'s."""


class Memory:
    """Remembers the arrays it gave away; views keep an array in use as references do."""

    def __init__(self) -> None:
        self._arrays: deque[NDArray[Any]] = deque(maxlen=_MOST)

    def take(self, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        """Returns an array with any contents that nobody else holds, nor a view of it."""
        for array in self._arrays:
            if array.shape == shape and array.dtype == dtype and getrefcount(array) == _UNUSED:
                return array
        array = np.empty(shape, dtype)
        self._arrays.append(array)
        return array
