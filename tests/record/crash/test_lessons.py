"""Torch errors become lessons: each is provoked, and its lesson and module are checked."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from comgra_decl.hooks.place import ProgramPlace
from comgra_decl.record.crash.lessons import PARTS, Lesson, lessons
from comgra_decl.record.crash.post_mortem import post_mortem
from tests.record.crash.mistakes import IN_A_MODULE, OUTSIDE, Mistake

BY_MESSAGE = {"device_assert", "device_memory"}
"""Lessons on errors that need a GPU, of which only the messages are tested."""

ELSEWHERE = {"unused_parameters"}
"""Lessons whose errors are raised in `test_post_mortem`."""

SAME = {"gather_index": "index_out_of_bounds", "collate_sizes": "stack_sizes"}
"""Mistakes whose error is the same as that of another mistake."""


def examined(mistake: Mistake) -> dict[str, Any]:
    """Return the post-mortem of a program."""
    place = ProgramPlace(7, False, lambda _: None, list)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on some of the mistakes
        try:
            mistake()
        except Exception as error:  # noqa: BLE001
            return post_mortem(error, place)
    raise AssertionError("the program does not fail")


@pytest.mark.parametrize("name", IN_A_MODULE)
def test_an_error_in_a_module_is_translated_and_names_the_module(name: str) -> None:
    found = examined(IN_A_MODULE[name])
    assert found["lesson"] is not None, found["error"]
    assert found["lesson"]["name"] == SAME.get(name, name)
    assert found["module"] == "body.1"
    assert [call["node"] for call in found["calls"]] == ["Model", "body.1"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_error_outside_the_model_is_translated(name: str) -> None:
    found = examined(OUTSIDE[name])
    assert found["lesson"] is not None, found["error"]
    assert found["lesson"]["name"] == SAME.get(name, name)


def test_every_lesson_has_a_mistake_that_raises_its_error() -> None:
    raised = {SAME.get(name, name) for name in (*IN_A_MODULE, *OUTSIDE)}
    assert raised | ELSEWHERE | BY_MESSAGE == {lesson.name for lesson in lessons()}
    page = (Path(__file__).parents[3] / "docs" / "around.md").read_text()
    assert f"The catalogue contains {len(lessons())} torch errors" in page


def test_names_of_lessons_are_unique_and_their_texts_complete() -> None:
    assert len({lesson.name for lesson in lessons()}) == len(lessons())
    for lesson in lessons():
        assert lesson.title
        assert lesson.meaning.endswith(".")
        assert lesson.causes
        assert lesson.look
        assert set(lesson.decides) <= set(PARTS)
        assert _fields(lesson) <= set(lesson.pattern.groupindex)


def _fields(lesson: Lesson) -> set[str]:
    texts = (lesson.title, lesson.meaning, *lesson.causes, *lesson.look)
    return {name for text in texts for name in re.findall(r"{(\w*)}", text)}


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("CUDA error: device-side assert triggered\nCUDA kernel errors might be", "device_assert"),
        (
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total",
            "device_memory",
        ),
        ("DataLoader worker (pid(s) 4, 5) exited unexpectedly", "worker_killed"),
        (
            "found at least two devices, cuda:0 and cpu! (when checking argument mat1)",
            "two_devices",
        ),
    ],
)
def test_messages_that_need_other_machines_are_known(message: str, name: str) -> None:
    def fail() -> None:
        raise RuntimeError(message)

    assert examined(fail)["lesson"]["name"] == name


def test_the_numbers_of_the_message_appear_in_the_translation() -> None:
    lesson = examined(IN_A_MODULE["matmul_shapes"])["lesson"]
    assert lesson["meaning"] == (
        "The first matrix has 8 columns and the second one 6 rows. In a layer, the input has 8 "
        "features in its last dimension, but the weight expects 6."
    )
    assert lesson["decides"] == ["inputs", "parameters", "variables"]


def test_an_unknown_error_has_facts_but_no_translation() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such key", x.shape)

    from tests.record.crash.mistakes import _in

    found = examined(_in(forward, torch.ones(2, 3)))
    assert found["lesson"] is None
    assert found["module"] == "body.1"
    assert found["calls"][-1]["inputs"][0]["shape"] == [2, 3]


def test_the_cause_of_an_error_is_translated_if_the_error_itself_is_unknown() -> None:
    def wrapped() -> None:
        try:
            IN_A_MODULE["embedding_index"]()
        except IndexError as error:
            raise ValueError("the run failed") from error

    found = examined(wrapped)
    assert found["error"] == {"type": "ValueError", "message": "the run failed"}
    reason = {"type": "IndexError", "message": "index out of range in self", "how": "cause"}
    assert found["because"] == [reason]
    assert found["lesson"]["name"] == "embedding_index"
    assert found["module"] == "body.1"
