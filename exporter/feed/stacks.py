"""Stack requests of the sidecar, and stack files of the training processes, in a feed directory.

The sidecar replaces the request file, and each process writes a stack file once for a new request. Both are JSON of bounded size.
A reader trusts regular files of its own user, of root and of the directory's owner, and stack files of the owner of the feed file. If a
file of the usual name belongs to a different user, an alternative name is used (`entries.py`).
"""
# ruff: noqa: PTH116, PTH118 - this package uses string paths in the job and in the sidecar

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Any

from exporter.errors import FeedFormatError
from exporter.feed.directory import own_uid
from exporter.feed.entries import FileStamp, newest_entry, own_entry
from exporter.feed.files import FEED, OWN_MODE, SHARED_MODE, STACKS, is_process_id, open_regular, replace_file
from exporter.recording.stacks import (
    MAX_FRAMES,
    MAX_STACK_NAME_CHARACTERS,
    MAX_THREAD_FRAMES,
    MAX_THREADS,
    Frame,
    StackDetail,
    ThreadStack,
)
from exporter.recording.value_class import Value, value_class

REQUEST = "stacks.request"
"""Name of the request file."""
MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 32 * 1024
MAX_SHORTENED_CHARACTERS = 100
"""Maximum length of a file, function or thread name in an answer that would exceed `MAX_ANSWER_BYTES`."""
MAX_NUMBER = 1e18
"""Bound that the absolute value of a number must not reach. NaN and booleans are refused too."""
MAX_GROUPS = 16
"""Maximum number of process groups in an answer."""


@value_class
class StackRequest(Value):
    """Stack request of the sidecar, or of the command `stacks`."""

    id: str  # 32 hexadecimal digits, new for each request
    asked_at: float  # Unix time
    detail: StackDetail = StackDetail.FULL
    # Run whose processes log the event `training.hang`. Empty in a repeated request of a hang, and in a request of `stacks`.
    hang_of: str = ""


@value_class
class StackAnswer(Value):
    """Content of a stack file: the stacks of a training process."""

    request_id: str
    process_id: str  # as in the name of the feed file
    pid: int  # in the pid namespace of the process
    answered_at: float  # Unix time
    run: str
    rank: int | None
    main: ThreadStack
    others: tuple[ThreadStack, ...] = ()  # without idle threads and threads of the exporter
    phase: str | None = None
    phase_seconds: float | None = None  # age of the phase
    step: int | None = None  # last finished step
    # number of enqueued collectives by process group
    collective_counts: Mapping[str, int] = field(default_factory=dict)
    last_collective: str | None = None  # from torch's flight recorder, if enabled


def write_request(directory: str, request: StackRequest, *, is_shared: bool) -> None:
    """Replace the request of a directory; with *is_shared*, users other than the owner may read it. Raises OSError."""
    data = json.dumps({**asdict(request), "detail": request.detail.value}).encode()
    path = own_entry(os.path.join(directory, REQUEST))
    mode = SHARED_MODE if is_shared else OWN_MODE
    replace_file(path, data, temporary=f"{path}.{os.getpid()}.tmp", mode=mode)


def request_stamp(directory: str) -> FileStamp | None:
    """Return the stamp of the newest trusted request file, or None without a file."""
    entry = newest_entry(os.path.join(directory, REQUEST))
    return None if entry is None else entry.stamp()


def read_request(directory: str) -> StackRequest | None:
    """Return the newest trusted request of a directory, or None without a valid request."""
    try:
        fields = _read(directory, REQUEST, MAX_REQUEST_BYTES)
        if fields is None:
            return None
        return StackRequest(
            id=_process_id(fields, "id"),
            asked_at=_number(fields, "asked_at"),
            detail=StackDetail(fields.get("detail")),
            hang_of=_text(fields, "hang_of"),
        )
    except (OSError, FeedFormatError, ValueError):
        return None


def write_answer(directory: str, answer: StackAnswer) -> None:
    """Write the stack file of this process. Raises OSError.

    Above `MAX_ANSWER_BYTES`, half of the other threads is omitted repeatedly. If the main thread alone exceeds the limit, its texts
    are shortened.
    """
    data = _encode(answer)
    while len(data) > MAX_ANSWER_BYTES and answer.others:
        answer = _omit_threads(answer)
        data = _encode(answer)
    if len(data) > MAX_ANSWER_BYTES:
        answer = _shorten_texts(answer)
        data = _encode(answer)
    path = own_entry(os.path.join(directory, answer.process_id + STACKS))
    replace_file(path, data, temporary=path + ".tmp", mode=OWN_MODE)


def read_answer(directory: str, process_id: str) -> StackAnswer | None:
    """Return the stack file of a process, or None without a file.

    Raises FeedFormatError if the content is invalid or exceeds a limit, and OSError if the file is unreadable.
    """
    try:
        writer = os.stat(os.path.join(directory, process_id + FEED), follow_symlinks=False).st_uid
    except OSError:
        writer = None
    fields = _read(directory, process_id + STACKS, MAX_ANSWER_BYTES, writer)
    if fields is None:
        return None
    collective_counts = fields.get("collective_counts")
    if not isinstance(collective_counts, dict) or len(collective_counts) > MAX_GROUPS:
        raise _invalid("collective_counts", f"an object of at most {MAX_GROUPS} groups")
    others = fields.get("others")
    if not isinstance(others, list) or len(others) > MAX_THREADS:
        raise _invalid("others", f"a list of at most {MAX_THREADS} threads")
    return StackAnswer(
        request_id=_process_id(fields, "request_id"),
        process_id=_process_id(fields, "process_id"),
        pid=int(_number(fields, "pid")),
        answered_at=_number(fields, "answered_at"),
        run=_text(fields, "run"),
        rank=_optional_int(fields, "rank"),
        main=_thread(fields.get("main"), MAX_FRAMES),
        others=tuple([_thread(thread, MAX_THREAD_FRAMES) for thread in others]),
        phase=_optional_text(fields, "phase"),
        phase_seconds=_optional_number(fields, "phase_seconds"),
        step=_optional_int(fields, "step"),
        collective_counts={
            str(name)[:MAX_STACK_NAME_CHARACTERS]: int(_number(collective_counts, name))
            for name in collective_counts
        },
        last_collective=_optional_text(fields, "last_collective"),
    )


# Encoding ---------------------------------------------------------------------------------------------------


def _encode(answer: StackAnswer) -> bytes:
    return json.dumps(asdict(answer), separators=(",", ":")).encode()


def _omit_threads(answer: StackAnswer) -> StackAnswer:
    """Return an answer without the last half of the other threads."""
    return answer.replace(others=answer.others[: len(answer.others) // 2])


def _shorten_texts(answer: StackAnswer) -> StackAnswer:
    """Return an answer with shortened texts of the main thread: the ends of file and function names, which identify the code."""
    frames = tuple(
        [
            Frame(
                frame.file[-MAX_SHORTENED_CHARACTERS:],
                frame.line,
                frame.function[-MAX_SHORTENED_CHARACTERS:],
                frame.library,
            )
            for frame in answer.main.frames
        ]
    )
    return answer.replace(main=ThreadStack(answer.main.name[:MAX_SHORTENED_CHARACTERS], frames))


# Decoding, with checks of all limits -------------------------------------------------------------------------


def _read(directory: str, name: str, max_bytes: int, owner: int | None = None) -> dict[str, Any] | None:
    """Return the object in the newest trusted file of a name, or None without a file. *owner* is trusted too, if given."""
    entry = newest_entry(os.path.join(directory, name), owner)
    if entry is None:
        return None
    descriptor, status = open_regular(entry.path)
    try:
        if status.st_uid not in {own_uid(), 0, os.stat(directory).st_uid, owner}:
            raise FeedFormatError(f"{name} belongs to uid {status.st_uid}", reason="owner")
        if status.st_size > max_bytes:
            raise FeedFormatError(
                f"{name} has {status.st_size} bytes of at most {max_bytes}", reason="too_large"
            )
        data = os.pread(descriptor, max_bytes, 0)
    finally:
        os.close(descriptor)
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FeedFormatError(f"{name} is not JSON", reason="content") from error
    if not isinstance(fields, dict):
        raise FeedFormatError(f"{name} is not a JSON object", reason="content")
    return fields


def _invalid(name: str, expected: str) -> FeedFormatError:
    """Return the error of a field that is not *expected*, such as "a number below 1e+18"."""
    return FeedFormatError(f"stacks: {name} is not {expected}", reason="content")


def _process_id(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not is_process_id(value):
        raise _invalid(name, "32 hexadecimal digits")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > MAX_STACK_NAME_CHARACTERS or not value.isprintable():
        raise _invalid(name, f"printable text of at most {MAX_STACK_NAME_CHARACTERS} characters")
    return value


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < MAX_NUMBER:
        raise _invalid(name, f"a number below {MAX_NUMBER:g}")
    return value


def _optional_text(fields: Mapping[str, Any], name: str) -> str | None:
    return None if fields.get(name) is None else _text(fields, name)


def _optional_number(fields: Mapping[str, Any], name: str) -> float | None:
    return None if fields.get(name) is None else _number(fields, name)


def _optional_int(fields: Mapping[str, Any], name: str) -> int | None:
    return None if fields.get(name) is None else int(_number(fields, name))


def _thread(value: object, max_frames: int) -> ThreadStack:
    if not isinstance(value, dict) or not isinstance(value.get("frames"), list):
        raise _invalid("a thread", "an object with frames")
    if len(value["frames"]) > max_frames:
        raise _invalid("frames", f"a list of at most {max_frames}")
    return ThreadStack(_text(value, "name"), tuple([_frame(frame) for frame in value["frames"]]))


def _frame(value: object) -> Frame:
    if not isinstance(value, dict):
        raise _invalid("a frame", "an object")
    library = value.get("library") is True
    return Frame(_text(value, "file"), int(_number(value, "line")), _text(value, "function"), library)
