"""The benchmark of probes makes every picture. No times are asserted."""

from __future__ import annotations

import pytest

from benchmarks import probes
from comgra_decl.spec.pictures import METHODS


def test_every_method_is_measured() -> None:
    assert {*probes.IMAGES, *probes.WORDS} == {*METHODS}


@pytest.mark.slow
def test_memory_is_read_ten_times_while_every_picture_of_images_is_made() -> None:
    rows = probes.used_memory(10)
    assert [row["records"] for row in rows] == [*range(1, 11)]
    assert all(row["mb"] > 0 for row in rows)
