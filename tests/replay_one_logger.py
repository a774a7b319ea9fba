"""Replay of golden vectors of one-logger, each in a fresh process with a fake clock.

    python tests/replay_one_logger.py FILE...

prints each difference between the expected and the actual records. Exit status: 0 without differences, 1 with differences,
2 if a file cannot be replayed.

The expected records are `right`, or those of `reference` if `right` is null. The misuse counter must rise by one at each
step in `misuse`, and no call may raise. The default strategy of the library, which raises, is not configured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading  # noqa: F401  # before the clock is replaced: its locks wait in real time
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600
DIFFERENT = 3
"""Exit status of a replay with differences; an unhandled exception gives 1."""
LEFT_OUT = {"node_name", "one_logger_training_telemetry_version"}
SCHEMA = "one-logger-golden/1"
TOLERANCE = {"float_relative": 1e-6, "timestamp_sec_absolute": 1e-5, "msec_absolute": 1}
QUIET = "disable_quietly_and_report_metric_error"


class Clock:
    """Clock that changes only by assignment.

    Args:
        wall: Unix time at the start.
        monotonic: Monotonic time at the start.
    """

    def __init__(self, wall: float, monotonic: float) -> None:
        self._wall, self._monotonic = wall, monotonic
        self.now = 0.0
        self.offset = 0.0

    def wall(self) -> float:
        """Unix time."""
        return self._wall + self.now + self.offset

    def monotonic(self) -> float:
        """Monotonic time, and the performance counter's."""
        return self._monotonic + self.now

    def install(self) -> None:
        """Replace the clocks of this process for all modules that are imported later."""
        time.time = self.wall
        time.monotonic = time.perf_counter = self.monotonic
        time.time_ns = lambda: round(self.wall() * 1e9)
        time.monotonic_ns = time.perf_counter_ns = lambda: round(self.monotonic() * 1e9)


class Replay:
    """Replay of one vector in this process.

    Args:
        vector: The vector.
        clock: The fake clock.
        tolerance: Tolerances of the file.
    """

    def __init__(self, vector: Mapping[str, Any], clock: Clock, tolerance: Mapping[str, float]) -> None:
        from exporter import one_logger, training  # with the fake clock

        self.training = training
        self.one_logger = one_logger
        self.vector = vector
        self.clock = clock
        self.records: list[dict[str, Any]] = []
        self.expected = expected_records(vector)
        self.tolerance = tolerance
        self.problems: list[str] = []
        self.values: dict[str, Any] = {}  # of `set_value`
        self.returned: list[dict[str, Any]] = []  # values that the callables of each configuration return
        self.entered: list[tuple[str, Any]] = []
        self.step = 0

    def run(self) -> Iterator[str]:
        """Replay all steps, and return the differences."""
        import exporter  # with the fake clock

        self._configure()
        exporter.flush(timeout_seconds=60)
        before = self._misuse()  # of the configuration
        for step, (now, call, arguments) in enumerate(self.vector["steps"]):
            self.step = step
            self.clock.now = now
            try:
                self._do(call, arguments)
            except Exception as error:  # every exception is a difference
                yield f"step {self.step} {call}: raised {error!r}"
            if not exporter.flush(timeout_seconds=60):
                yield f"step {self.step} {call}: was not flushed"
            misuse = self._misuse()
            expected = 1 if self.step in self.vector.get("misuse", ()) else 0
            if misuse - before != expected:
                yield f"step {self.step} {call}: {misuse - before:g} misuses, expected {expected}"
            before = misuse
            yield from self._compare(call)
        yield from self.problems

    def _configure(self) -> None:
        one_logger, config = self.one_logger, dict(self.vector["config"])
        self.variables = set(config.pop("variables", ()))
        telemetry = config.pop("telemetry", None)
        strategy = config.pop("error_handling_strategy", None)
        if strategy == QUIET:
            config["error_handling_strategy"] = one_logger.OneLoggerErrorHandlingStrategy(strategy)
        if telemetry is not None:
            config["telemetry_config"] = self._telemetry(telemetry)
        settings = one_logger.OneLoggerConfig(
            **{"application_name": "replay"} | self._fields(config, one_logger.OneLoggerConfig)
        )
        provider = one_logger.TrainingTelemetryProvider.instance()
        provider.with_base_config(settings).with_exporter(_exporter(self)).configure_provider()

    def _telemetry(self, given: Mapping[str, Any]) -> Any:
        kind = self.one_logger.TrainingTelemetryConfig
        return kind(**self._fields(given, kind))

    def _fields(self, given: Mapping[str, Any], kind: type) -> dict[str, Any]:
        """Return fields by the names of the class, and variables as callables, also if they have no value yet."""
        fields: dict[str, Any] = {}
        returned: dict[str, Any] = {}
        self.returned.append(returned)
        for name in sorted({*given, *self.variables}):
            varies = hasattr(kind, f"{name}_or_fn")
            if name in self.variables and varies:
                returned[name] = given.get(name, self.values.get(name))
                fields[f"{name}_or_fn"] = lambda name=name: returned[name]
            elif name in given:
                fields[f"{name}_or_fn" if varies else name] = given[name]
        return fields

    def _do(self, call: str, arguments: dict[str, Any]) -> None:
        training = self.training
        if call == "cm_enter":
            name = arguments["name"]
            block = getattr(training, name)(**{key: arguments[key] for key in arguments if key != "name"})
            span = block.__enter__()
            if span is None:
                self.problems.append(f"step {self.step} {name}: returned None")
            self.entered.append((name, block))
        elif call == "cm_exit":
            self._exit(arguments["name"], raising=arguments.get("raise", False))
        elif call == "set_training_telemetry_config":
            settings = self._telemetry(arguments)
            self.one_logger.TrainingTelemetryProvider.instance().set_training_telemetry_config(settings)
        elif call == "set_value":
            for values in (self.values, *self.returned):
                values.update(arguments)
        elif call == "set_wall_offset":
            self.clock.offset = arguments["sec"]
        else:
            getattr(training, call)(**arguments)

    def _exit(self, name: str, *, raising: bool) -> None:
        places = [place for place, (entered, _) in enumerate(self.entered) if entered == name]
        if not places:
            return
        _, block = self.entered.pop(places[-1])
        if not raising:
            block.__exit__(None, None, None)
            return
        error = RuntimeError("of the body")
        if block.__exit__(type(error), error, None):
            self.problems.append(f"step {self.step} {name}: the exception of the body did not propagate")

    def _misuse(self) -> float:
        """Return the misuse counter as published in the feed."""
        from exporter.feed.decoder import decode  # with the fake clock

        feeds = list(Path(os.environ["EXPORTER_FEED_DIR"]).glob("*.feed"))
        stats = [stat for feed in feeds for stat in decode(feed.read_bytes()).recording.stats]
        return sum(stat.sum or 0 for stat in stats if stat.definition.name == "training.misuse")

    def _compare(self, call: str) -> Iterator[str]:
        expected = [record for record in self.expected if record["step"] == self.step]
        actual = [record for record in self.records if record["step"] == self.step]
        for mismatch in mismatches(expected, actual, self.tolerance):
            yield f"step {self.step} {call}: {mismatch}"


def _exporter(replay: Replay) -> object:
    """Return an exporter that keeps all records in memory, in the form of the vectors."""

    class Memory:
        def initialize(self) -> None:
            pass

        def export_start(self, span: Any) -> None:
            parent = span.parent_span
            self._keep(
                "span_start",
                span=span.name_str,
                parent=None if parent is None else parent.name_str,
                attributes=_plain(span.attributes),
            )

        def export_event(self, event: Any, span: Any) -> None:
            self._keep("event", event=event.name_str, span=span.name_str, attributes=_plain(event.attributes))

        def export_stop(self, span: Any) -> None:
            self._keep("span_stop", span=span.name_str, duration_msec=span.duration_msec())

        def export_error(self, event: Any, span: Any) -> None:
            del event
            self._keep("error", span=span.name_str)

        def export_telemetry_data_error(self, error: Any) -> None:
            replay.problems.append(f"step {replay.step}: {error}")

        def close(self) -> None:
            pass

        def _keep(self, kind: str, **fields: Any) -> None:
            replay.records.append({"step": replay.step, "type": kind, **fields})

    return Memory()


def _plain(attributes: Any) -> dict[str, Any]:
    found = json.loads(json.dumps(attributes.to_json()))
    return {name: value for name, value in found.items() if name not in LEFT_OUT}


def _subject(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record["type"], record.get("event"), record["span"]


def expected_records(vector: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the expected records of a vector."""
    right: list[dict[str, Any]] | None = vector.get("right")
    if right is not None:
        return right
    return [record for record in vector["reference"]["records"] if record["type"] != "telemetry_data_error"]


def mismatches(
    expected: list[dict[str, Any]], actual: list[dict[str, Any]], tolerance: Mapping[str, float]
) -> list[str]:
    """Compare records, in any order within a step."""
    missing, extra, found = list(expected), [], []
    for record in actual:
        match = next((each for each in missing if not list(differences(each, record, tolerance))), None)
        if match is None:
            extra.append(record)
        else:
            missing.remove(match)
    for record in missing:
        where = record["step"], _subject(record)
        near = next((record for record in extra if (record["step"], _subject(record)) == where), None)
        if near is None:
            found.append(f"missing {record}")
            continue
        extra.remove(near)
        found += [f"{_subject(record)}: {difference}" for difference in differences(record, near, tolerance)]
    return found + [f"superfluous {record}" for record in extra]


def differences(
    expected: Mapping[str, Any], found: Mapping[str, Any], tolerance: Mapping[str, float]
) -> Iterator[str]:
    """Compare two records, attribute by attribute."""
    for name in sorted({*expected, *found}):
        if name == "attributes" and name in expected and name in found:
            yield from differences(expected[name], found[name], tolerance)
        elif name not in expected:
            yield f"{name} is {found[name]!r}, expected to be absent"
        elif name not in found:
            yield f"{name} is absent, expected {expected[name]!r}"
        elif not same(name, expected[name], found[name], tolerance):
            yield f"{name} is {found[name]!r}, expected {expected[name]!r}"


def same(name: str, expected: Any, found: Any, tolerance: Mapping[str, float]) -> bool:
    """Compare two values; integers exactly, also with a float."""
    if isinstance(expected, bool) or isinstance(found, bool):
        return expected is found
    if not isinstance(expected, int | float) or not isinstance(found, int | float):
        return bool(expected == found)
    if name.endswith("timestamp_sec"):
        return abs(expected - found) <= tolerance["timestamp_sec_absolute"]
    if name in {"timestamp_msec", "duration_msec"}:
        return abs(expected - found) <= tolerance["msec_absolute"]
    if isinstance(expected, int):
        return expected == found
    return abs(expected - found) <= tolerance["float_relative"] * max(1, abs(expected), abs(found))


def replay_one(path: str, number: int) -> int:
    """Replay one vector of a file in this process, and return the exit status."""
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    start = content["clock"]
    clock = Clock(start["wall_start_sec"], start["monotonic_start_sec"])
    clock.install()
    tolerance = TOLERANCE | content.get("tolerance", {})
    problems = list(Replay(content["vectors"][number], clock, tolerance).run())
    for problem in problems:
        print(f"  {problem}")
    return DIFFERENT if problems else 0


def replay_all(paths: list[str]) -> int:
    """Replay all vectors of all files, each in a separate process, and return the exit status."""
    contents = {}
    for path in paths:
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            print(f"{path}: {error}")
            return 2
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            print(f"{path}: not of the schema {SCHEMA}")
            return 2
        contents[path] = content
    failed = total = 0
    for path, content in contents.items():
        for number, vector in enumerate(content["vectors"]):
            total += 1
            problems = replay_apart(path, number)
            print(
                f"{vector.get('id', number)}: {'DIFFERENT' if problems else 'same'}",
                problems,
                sep="\n",
                end="",
            )
            failed += bool(problems)
    print(f"{total - failed} of {total} vectors are the same")
    return 1 if failed or not total else 0


def replay_apart(path: str, number: int) -> str:
    """Replay one vector of a file in a separate process, and return the differences as lines."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("EXPORTER_") and name not in {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"}
    }
    path_of_modules = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="replay-") as feed:
        environment = {"EXPORTER_FEED_DIR": feed, "EXPORTER_RUN": "replay", "PYTHONPATH": path_of_modules}
        try:
            completed = subprocess.run(
                [sys.executable, __file__, "--vector", path, str(number)],
                env=inherited | environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"  no end within {SECONDS} seconds\n"
    if completed.returncode in {0, DIFFERENT}:
        return completed.stdout
    return f"{completed.stdout}  ended with status {completed.returncode}:\n{completed.stderr}"


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "--vector":
        sys.exit(replay_one(sys.argv[2], int(sys.argv[3])))
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print(__doc__)
        sys.exit(0 if sys.argv[1:] else 2)
    sys.exit(replay_all(sys.argv[1:]))
