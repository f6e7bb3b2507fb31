"""Select the elements of a tensor that enter its histogram."""

from __future__ import annotations

from math import gcd


def sample_stride(numel: int, elements: int, limit: int) -> tuple[int, int]:
    """Return (stride, count) of the flat elements `0, stride, 2 * stride, ...` to sample.

    If there are at most `limit` elements, all of them are sampled. Otherwise, the stride is the
    smallest one that stays within `limit` and shares no divisor with `elements`, the number of
    elements in one sample. With a stride of 64, a [batch, 256] activation would contribute only the
    same four features of every sample, and the histogram would show these features instead of the
    layer. A coprime stride visits every position of the value dims equally often and reaches the
    last sample.

    Args:
        numel: elements in the whole tensor, batch included.
        elements: elements in one sample (the product of the value dims).
        limit: maximum number of elements.
    """
    if numel <= limit:
        return 1, numel
    stride = -(-numel // limit)
    while gcd(stride, elements) != 1:
        stride += 1
    return stride, -(-numel // stride)
