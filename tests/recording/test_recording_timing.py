from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

import pytest

from exporter import DefinitionError, Stat, flush
from exporter.recording.timing import Timer

numbers = itertools.count()


def timed() -> tuple[Timer, list[float]]:
    samples: list[float] = []
    return Timer(samples.append), samples


def test_a_block_is_timed_also_when_it_raises() -> None:
    timer, samples = timed()

    @timer
    def fail() -> None:
        time.sleep(0.01)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    with pytest.raises(ZeroDivisionError), timer:
        1 / 0  # noqa: B018  # raising is the point

    assert len(samples) == 2
    assert 0.009 < samples[0] < 10


def test_a_function_is_timed_and_keeps_its_face() -> None:
    timer, samples = timed()

    @timer
    def double(number: int, *, by: int = 2) -> int:
        """Doc."""
        return number * by

    assert double(3, by=4) == 12
    assert (double.__name__, double.__doc__) == ("double", "Doc.")
    assert str(inspect.signature(double)) == "(number: 'int', *, by: 'int' = 2) -> 'int'"
    assert len(samples) == 1


def test_a_coroutine_is_timed_with_its_waiting() -> None:
    timer, samples = timed()

    @timer
    async def wait() -> str:
        await asyncio.sleep(0.02)
        return "done"

    async def both() -> list[str]:
        return list(await asyncio.gather(wait(), wait()))

    assert inspect.iscoroutinefunction(wait)
    assert asyncio.run(both()) == ["done", "done"]
    assert len(samples) == 2
    assert min(samples) > 0.015


def test_a_generator_is_timed_from_its_first_step_to_its_end() -> None:
    timer, samples = timed()

    @timer
    def count() -> Iterator[int]:
        yield 1
        time.sleep(0.01)
        yield 2

    @timer
    async def count_later() -> AsyncIterator[int]:
        yield 1
        await asyncio.sleep(0.01)

    async def consume() -> list[int]:
        return [number async for number in count_later()]

    assert list(count()) == [1, 2]
    assert asyncio.run(consume()) == [1]
    assert len(samples) == 2
    assert min(samples) > 0.008


def test_a_stat_times_in_seconds_and_refuses_other_units() -> None:
    stat = Stat(f"timing.test{next(numbers)}", ["mean"], unit="seconds")
    with stat.time():
        time.sleep(0.01)
    flush()

    assert stat.count == 1
    assert 0.009 < stat.sum < 10
    with pytest.raises(DefinitionError, match="its unit is 'bytes'"):
        Stat(f"timing.test{next(numbers)}", ["mean"], unit="bytes").time()


def test_what_is_sent_and_thrown_into_an_asynchronous_generator_reaches_it() -> None:
    seconds: list[float] = []

    @Timer(seconds.append)
    async def echo() -> AsyncGenerator[object, object]:
        got: object = "first"
        while True:
            try:
                got = yield got
            except KeyError:
                got = "thrown"

    async def use() -> list[object]:
        generator = echo()
        found = [
            await generator.__anext__(),
            await generator.asend("sent"),
            await generator.athrow(KeyError()),
        ]
        await generator.aclose()
        return found

    assert asyncio.run(use()) == ["first", "sent", "thrown"]
    assert len(seconds) == 1
