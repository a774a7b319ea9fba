"""Descriptions of machines to replay: messages about mistakes, and completeness of the guide."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from typing import Any

import pytest
from gpu_support import parse_machine, small_text
from hypothesis import given
from hypothesis import strategies as st
from places import PROJECT

from exporter.collectors.gpu.nvml import MessageReader, ProtocolError, encode, parse
from exporter.collectors.gpu.nvml.library import CODES, name_of
from exporter.config.options import options_of
from exporter.errors import ConfigurationError
from exporter.replay import description
from exporter.replay.library import SYMBOLS
from exporter.replay.machines import load_machine, machine_names
from exporter.replay.readings import READINGS

GUIDE = PROJECT / "docs" / "replay.md"


def problems_of(yaml_text: str) -> list[str]:
    """Return the problems of an invalid description."""
    with pytest.raises(ConfigurationError) as error_info:
        parse_machine(yaml_text)
    return [str(problem) for problem in error_info.value.problems]


@pytest.mark.parametrize(
    ("timeline_entry", "message"),
    [
        ("errors: {nvmlDeviceGetPowerUsge: UNKNOWN}", 'did you mean "nvmlDeviceGetPowerUsage"?'),
        ("errors: {nvmlDeviceGetPowerUsage: GPU_LOST}", 'did you mean "GPU_IS_LOST"?'),
        ("hang: [nvmlMakeCoffee]", 'no function "nvmlMakeCoffee" is replayed'),
        ('delay: {"*": 1s}', 'no function "*" is replayed'),
        ("gpus: [2]", "no GPU 2; the machine has 2"),
        ("at: 5s, until: 3s", "is not after the start"),
        ("fields: {power: 5}", '"power" is not an id'),
        ("driver: new", "a version such as"),
        ("processes: [{pid: 0}]", "pid: expected a whole number"),
        ("set: {energy: {idle: 5, bits: 32}}", "only a counter has a width"),
        ("set: {powr: 1}", 'no reading "powr", did you mean "power"?'),
    ],
)
def test_a_mistake_in_the_timeline_is_found_at_its_place(timeline_entry: str, message: str) -> None:
    (problem,) = problems_of(small_text(timeline_entry))

    assert message in problem
    assert problem.startswith("machine.yaml:22:")


@pytest.mark.parametrize(
    ("yaml_text", "message"),
    [
        (small_text(head='cuda: "thirteen"'), "cuda: expected a version such as"),
        (
            small_text().replace("gpus:", "gpus:\n  - {model: small, count: 63}"),
            "gpus: are 65; at most 64 are monitored",
        ),
        (
            small_text(model="load: {steps: [{seconds: 0, level: 1}]}"),
            "steps: last 0s in total",
        ),
    ],
)
def test_an_impossible_machine_is_reported(yaml_text: str, message: str) -> None:
    (problem,) = problems_of(yaml_text)

    assert message in problem


def test_several_mistakes_are_reported_together() -> None:
    problems = problems_of("costs: {nvmlNo: 1}\nmissing: [nvmlNo]\ngpus: [{model: none}]\n")

    positions = [problem.split(" ")[0][-5:] for problem in problems]
    assert positions == [":1:8:", "2:10:", ":3:7:"]


def test_an_unknown_machine_is_reported() -> None:
    with pytest.raises(
        ConfigurationError, match=r'no machine "h1000" to replay; choose one of a100-mig, .*h100'
    ):
        load_machine("h1000")


@pytest.mark.parametrize("name", machine_names())
def test_a_packaged_machine_has_a_description_and_fits_the_pipe(name: str) -> None:
    description = load_machine(name)

    assert len(description.description) > 30
    assert len(json.dumps(description.plain())) < 1 << 16  # the capacity of a pipe


@given(
    st.lists(
        st.dictionaries(st.text(max_size=5), st.integers() | st.text() | st.none(), max_size=4), max_size=5
    ),
    st.integers(1, 17),
)
def test_messages_are_reassembled_from_any_chunks(contents: list[dict[str, Any]], chunk_bytes: int) -> None:
    messages = [{**content, "kind": "any"} for content in contents]
    stream = b"".join(map(encode, messages))
    read_descriptor, write_descriptor = os.pipe()
    with open(read_descriptor, "rb"), open(write_descriptor, "wb", buffering=0) as pipe:  # noqa: PTH123  # pathlib opens no descriptors
        pipe.writelines(stream[start : start + chunk_bytes] for start in range(0, len(stream), chunk_bytes))
        pipe.close()

        reader, decoded_messages = MessageReader(read_descriptor), list[dict[str, Any]]()
        while (new_messages := reader.receive()) is not None:
            decoded_messages += new_messages

        assert decoded_messages == messages


@pytest.mark.parametrize("line", [b"HTTP/1.1", b"", b"[]", b'{"kind":1}', b"[" * 100_000, b"\xff"])
def test_json_that_is_not_a_message_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse(line)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode({"kind": "sample", "value": number})


# Against the binding, and the guide --------------------------------------------------------------------


def test_the_names_of_errors_are_those_of_the_binding() -> None:
    pynvml = pytest.importorskip("pynvml")
    codes = {
        name.removeprefix("NVML_ERROR_").lower(): code
        for name, code in vars(pynvml).items()
        if name.startswith("NVML_ERROR_")
    }

    assert codes == CODES
    assert name_of(12345) == "other"
    assert CODES["gpu_is_lost"] == 15


def test_the_guide_documents_every_key_reading_and_machine() -> None:
    documented_keys = {
        line.split("`")[1] for line in GUIDE.read_text().splitlines() if line.startswith("| `")
    }
    dataclass_types = [
        member
        for member in vars(description).values()
        if getattr(member, "__module__", "") == description.__name__
        and isinstance(member, type)
        and dataclasses.is_dataclass(member)
    ]

    assert len(dataclass_types) == 9
    for dataclass_type in dataclass_types:
        assert documented_keys >= {option.key for option in options_of(dataclass_type)}
    assert documented_keys >= {*READINGS, *machine_names()}


def test_a_replay_has_only_functions_that_the_child_calls() -> None:
    child_source = "".join(
        path.read_text() for path in (PROJECT / "exporter/collectors/gpu/nvml").glob("*.py")
    )
    # pynvml calls the versioned functions, and nvmlErrorString for the text of an exception.
    function_names = {
        symbol: re.sub(r"(_v\d|WithFlags)$", "", symbol) for symbol in SYMBOLS - {"nvmlErrorString"}
    }

    assert [symbol for symbol, name in function_names.items() if f'"{name}' not in child_source] == []


def test_the_examples_of_the_guide_can_be_replayed() -> None:
    blocks = GUIDE.read_text().split("```yaml\n")[1:]

    assert len(blocks) >= 2
    for block in blocks:
        assert parse_machine(block.partition("```")[0]).gpus
