"""Specifications of families: each checks itself when it is made."""

from __future__ import annotations

from typing import Any

import pytest

from exporter.families import FamilySpec

GOOD: dict[str, Any] = {
    "name": "host_wait_seconds_total",
    "type": "counter",
    "unit": "seconds",
    "labels": ("device",),
    "help": "Time spent waiting.",
    "source": "/proc/wait",
}


def test_a_specification_that_agrees_with_itself_is_made() -> None:
    assert FamilySpec(**GOOD).labels == ("device",)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "host_wait_seconds"}, "the name of type counter ends in _total"),
        ({"type": "gauge"}, "the name of type gauge does not end in _total"),
        ({"type": "info", "unit": ""}, "the name of type info ends in _info"),
        ({"type": "timer"}, "no exposition type timer"),
        ({"unit": ""}, "is not the base unit at the end of the name"),
        ({"unit": "bytes"}, "is not the base unit at the end of the name"),
        ({"name": "host_Wait_seconds_total"}, "lower case"),
        ({"labels": ("device", "device")}, "not distinct"),
        ({"labels": ("not a name",)}, "not distinct lower case names"),
        ({"help": " "}, "help or source is empty"),
        ({"source": ""}, "help or source is empty"),
    ],
)
def test_a_specification_that_contradicts_itself_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FamilySpec(**GOOD | wrong)


def test_a_specification_is_written_with_keywords_only() -> None:
    with pytest.raises(TypeError):
        FamilySpec("host_load1", "gauge", "Load.")  # type: ignore[call-arg]
