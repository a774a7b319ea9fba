"""Request and answer files in the feed directory, captured stacks, and the responder of a process.

The reader of the files refuses values beyond a limit, and follows no link.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from time import time

import pytest

from exporter.errors import FeedFormatError
from exporter.feed.files import STACKS
from exporter.feed.stacks import (
    MAX_ANSWER_BYTES,
    REQUEST,
    StackAnswer,
    StackRequest,
    read_answer,
    read_request,
    write_answer,
    write_request,
)
from exporter.recording.stacks import Frame, StackDetail, ThreadStack, capture
from exporter.responder import FeedLocation, StackResponder, TrainingPosition

PROCESS = "ab" * 16
FRAME = Frame("/job/train.py", 12, "main")
ANSWER = StackAnswer(
    "cd" * 16, PROCESS, 77, 1.5, "r", 3, ThreadStack("MainThread", (FRAME,)), collective_counts={"default": 5}
)


def test_a_request_round_trips_and_is_private(tmp_path: Path) -> None:
    request = StackRequest("ef" * 16, 12.5, StackDetail.LOCATION, "llama")
    write_request(str(tmp_path), request, is_shared=False)

    assert read_request(str(tmp_path)) == request
    assert (tmp_path / REQUEST).stat().st_mode & 0o777 == 0o600


def test_an_answer_round_trips_and_is_private(tmp_path: Path) -> None:
    write_answer(str(tmp_path), ANSWER)

    assert read_answer(str(tmp_path), PROCESS) == ANSWER
    assert (tmp_path / (PROCESS + STACKS)).stat().st_mode & 0o777 == 0o600


def test_a_long_answer_drops_other_threads_and_keeps_the_main_stack(tmp_path: Path) -> None:
    long_frame = Frame("/x/" + "d" * 250, 1, "f" * 250)
    threads = tuple([ThreadStack(f"t{index}", (long_frame,) * 3) for index in range(20)])
    long_answer = replace(ANSWER, main=ThreadStack("MainThread", (long_frame,) * 30), others=threads)
    write_answer(str(tmp_path), long_answer)
    answer = read_answer(str(tmp_path), PROCESS)

    assert (tmp_path / (PROCESS + STACKS)).stat().st_size <= MAX_ANSWER_BYTES
    assert answer is not None
    assert answer.main == long_answer.main
    assert len(answer.others) < 20


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": "../x"},
        {"pid": "7"},
        {"answered_at": True},
        {"run": "a\nb"},
        {"main": {"name": "m", "frames": [asdict(FRAME)] * 31}},
        {"main": {"name": "m", "frames": [{"file": "x" * 257, "line": 1, "function": "f"}]}},
        {"others": [{"name": "m", "frames": []}] * 21},
        {"collective_counts": {str(index): 1 for index in range(17)}},
        {"collective_counts": {"default": "many"}},
    ],
)
def test_an_answer_that_breaks_a_limit_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    (tmp_path / (PROCESS + STACKS)).write_text(json.dumps(asdict(ANSWER) | change))

    with pytest.raises(FeedFormatError):
        read_answer(str(tmp_path), PROCESS)


def test_deeply_nested_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / (PROCESS + STACKS)).write_text("[" * 16000 + "]" * 16000)

    with pytest.raises(FeedFormatError):
        read_answer(str(tmp_path), PROCESS)


def test_a_request_that_is_a_link_is_ignored(tmp_path: Path) -> None:
    write_request(str(tmp_path), StackRequest("ef" * 16, 12.5), is_shared=True)
    (tmp_path / REQUEST).rename(tmp_path / "elsewhere")
    (tmp_path / REQUEST).symlink_to(tmp_path / "elsewhere")

    assert read_request(str(tmp_path)) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create files of another user")
def test_a_request_of_another_user_is_ignored(tmp_path: Path) -> None:
    write_request(str(tmp_path), StackRequest("ef" * 16, 12.5), is_shared=True)
    os.chown(tmp_path / REQUEST, 12345, 12345)

    assert read_request(str(tmp_path)) is None


def test_a_stack_has_files_lines_and_functions_and_no_values() -> None:
    secret = "password"  # noqa: F841  # the value of a local variable, which a stack must not contain
    main, _ = capture(StackDetail.FULL)

    assert main.frames[0].file == __file__
    assert "password" not in json.dumps(asdict(main))


def test_a_location_has_the_innermost_frame_of_the_job_and_no_other_threads() -> None:
    main, others = capture(StackDetail.LOCATION)

    assert [frame.file for frame in main.frames] == [__file__]
    assert others == ()


def test_a_process_logs_each_hang_of_its_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.responder.CHECK_INTERVAL_SECONDS", 0.0)
    position = TrainingPosition(step=5)
    hangs: list[StackAnswer] = []
    location = FeedLocation(str(tmp_path), PROCESS, "r", 0)
    responder = StackResponder(lambda: location, lambda: position, hangs.append)
    for index, step in enumerate((5, 5, 9)):  # the second request is from a restarted sidecar
        position = TrainingPosition(step=step)
        request = StackRequest(f"{index:032x}", time(), StackDetail.FULL, "r")
        write_request(str(tmp_path), request, is_shared=False)
        responder.tick()

    assert [hang.step for hang in hangs] == [5, 9]
