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
import threading  # noqa: F401  # imported before the clock is replaced, so that its locks wait in real time
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 600
STATUS_DIFFERENT = 3
"""Exit status of a replay with differences; an unhandled exception gives 1."""
IGNORED_ATTRIBUTES = {"node_name", "one_logger_training_telemetry_version"}
SCHEMA = "one-logger-golden/1"
TOLERANCE = {"float_relative": 1e-6, "timestamp_sec_absolute": 1e-5, "msec_absolute": 1}
QUIET_STRATEGY = "disable_quietly_and_report_metric_error"


class Clock:
    """Clock that changes only by assignment.

    Args:
        wall: Unix time at the start.
        monotonic: Monotonic time at the start.

    Attributes:
        now: Seconds since the start.
        offset: Seconds by which the wall clock has been set forward.
    """

    def __init__(self, wall: float, monotonic: float) -> None:
        self._wall, self._monotonic = wall, monotonic
        self.now = 0.0
        self.offset = 0.0

    def wall(self) -> float:
        """Return the Unix time in seconds."""
        return self._wall + self.now + self.offset

    def monotonic(self) -> float:
        """Return the monotonic time in seconds, which is also the performance counter."""
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
        vector: Vector to replay.
        clock: Fake clock.
        tolerance: Tolerances of the file by kind of value.
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
        self.values: dict[str, Any] = {}  # set by the call `set_value`
        self.callable_values: list[dict[str, Any]] = []  # returned by the callables of each configuration
        self.open_blocks: list[tuple[str, Any]] = []
        self.step = 0

    def run(self) -> Iterator[str]:
        """Replay all steps and yield the differences."""
        import exporter  # with the fake clock

        self._configure()
        exporter.flush(timeout_seconds=60)
        previous_misuse = self._misuse()  # caused by the configuration
        for step, (seconds, call, arguments) in enumerate(self.vector["steps"]):
            self.step = step
            self.clock.now = seconds
            try:
                self._do(call, arguments)
            except Exception as error:  # every exception is a difference
                yield f"step {self.step} {call}: raised {error!r}"
            if not exporter.flush(timeout_seconds=60):
                yield f"step {self.step} {call}: was not flushed"
            misuse = self._misuse()
            expected = 1 if self.step in self.vector.get("misuse", ()) else 0
            if misuse - previous_misuse != expected:
                yield f"step {self.step} {call}: {misuse - previous_misuse:g} misuses, expected {expected}"
            previous_misuse = misuse
            yield from self._compare(call)
        yield from self.problems

    def _configure(self) -> None:
        one_logger, config = self.one_logger, dict(self.vector["config"])
        self.variables = set(config.pop("variables", ()))
        telemetry = config.pop("telemetry", None)
        strategy = config.pop("error_handling_strategy", None)
        if strategy == QUIET_STRATEGY:
            config["error_handling_strategy"] = one_logger.OneLoggerErrorHandlingStrategy(strategy)
        if telemetry is not None:
            config["telemetry_config"] = self._telemetry(telemetry)
        settings = one_logger.OneLoggerConfig(
            **{"application_name": "replay"} | self._fields(config, one_logger.OneLoggerConfig)
        )
        provider = one_logger.TrainingTelemetryProvider.instance()
        provider.with_base_config(settings).with_exporter(_exporter(self)).configure_provider()

    def _telemetry(self, fields: Mapping[str, Any]) -> Any:
        config_class = self.one_logger.TrainingTelemetryConfig
        return config_class(**self._fields(fields, config_class))

    def _fields(self, values: Mapping[str, Any], config_class: type) -> dict[str, Any]:
        """Return fields by the names of the class, with callables for variables."""
        fields: dict[str, Any] = {}
        callable_values: dict[str, Any] = {}
        self.callable_values.append(callable_values)
        for name in sorted({*values, *self.variables}):
            has_callable_form = hasattr(config_class, f"{name}_or_fn")
            if name in self.variables and has_callable_form:
                callable_values[name] = values.get(name, self.values.get(name))
                fields[f"{name}_or_fn"] = lambda name=name: callable_values[name]
            elif name in values:
                fields[f"{name}_or_fn" if has_callable_form else name] = values[name]
        return fields

    def _do(self, call: str, arguments: dict[str, Any]) -> None:
        training = self.training
        if call == "cm_enter":
            name = arguments["name"]
            block = getattr(training, name)(**{key: arguments[key] for key in arguments if key != "name"})
            span = block.__enter__()
            if span is None:
                self.problems.append(f"step {self.step} {name}: returned None")
            self.open_blocks.append((name, block))
        elif call == "cm_exit":
            self._exit(arguments["name"], is_raising=arguments.get("raise", False))
        elif call == "set_training_telemetry_config":
            settings = self._telemetry(arguments)
            self.one_logger.TrainingTelemetryProvider.instance().set_training_telemetry_config(settings)
        elif call == "set_value":
            for values in (self.values, *self.callable_values):
                values.update(arguments)
        elif call == "set_wall_offset":
            self.clock.offset = arguments["sec"]
        else:
            getattr(training, call)(**arguments)

    def _exit(self, name: str, *, is_raising: bool) -> None:
        """Leave the innermost open block with this name. Does nothing if no such block is open."""
        positions = [
            position for position, (block_name, _) in enumerate(self.open_blocks) if block_name == name
        ]
        if not positions:
            return
        _, block = self.open_blocks.pop(positions[-1])
        if not is_raising:
            block.__exit__(None, None, None)
            return
        error = RuntimeError("raised in the block")
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
                attributes=_json_attributes(span.attributes),
            )

        def export_event(self, event: Any, span: Any) -> None:
            self._keep(
                "event",
                event=event.name_str,
                span=span.name_str,
                attributes=_json_attributes(event.attributes),
            )

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


def _json_attributes(attributes: Any) -> dict[str, Any]:
    values = json.loads(json.dumps(attributes.to_json()))
    return {name: value for name, value in values.items() if name not in IGNORED_ATTRIBUTES}


def _subject(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the type, the event (None unless the record is an event) and the span of a record."""
    return record["type"], record.get("event"), record["span"]


def expected_records(vector: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the expected records of a vector: `right`, or those of `reference` if `right` is null or absent.

    Errors about missing telemetry are not compared.
    """
    right: list[dict[str, Any]] | None = vector.get("right")
    if right is not None:
        return right
    return [record for record in vector["reference"]["records"] if record["type"] != "telemetry_data_error"]


def mismatches(
    expected: list[dict[str, Any]], actual: list[dict[str, Any]], tolerance: Mapping[str, float]
) -> list[str]:
    """Return the differences between the records of a step. The order of the records does not matter."""
    missing, extra, problems = list(expected), [], []
    for record in actual:
        match = next(
            (candidate for candidate in missing if not list(differences(candidate, record, tolerance))), None
        )
        if match is None:
            extra.append(record)
        else:
            missing.remove(match)
    for record in missing:
        key = record["step"], _subject(record)
        similar = next((record for record in extra if (record["step"], _subject(record)) == key), None)
        if similar is None:
            problems.append(f"missing {record}")
            continue
        extra.remove(similar)
        problems += [
            f"{_subject(record)}: {difference}" for difference in differences(record, similar, tolerance)
        ]
    return problems + [f"superfluous {record}" for record in extra]


def differences(
    expected: Mapping[str, Any], actual: Mapping[str, Any], tolerance: Mapping[str, float]
) -> Iterator[str]:
    """Yield the differences between two records, field by field."""
    for name in sorted({*expected, *actual}):
        if name == "attributes" and name in expected and name in actual:
            yield from differences(expected[name], actual[name], tolerance)
        elif name not in expected:
            yield f"{name} is {actual[name]!r}, expected to be absent"
        elif name not in actual:
            yield f"{name} is absent, expected {expected[name]!r}"
        elif not is_equal(name, expected[name], actual[name], tolerance):
            yield f"{name} is {actual[name]!r}, expected {expected[name]!r}"


def is_equal(name: str, expected: Any, actual: Any, tolerance: Mapping[str, float]) -> bool:
    """Return True if two values are equal within the tolerance.

    Except for times, an expected integer has no tolerance, even if the actual value is a float.
    """
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    if not isinstance(expected, int | float) or not isinstance(actual, int | float):
        return bool(expected == actual)
    if name.endswith("timestamp_sec"):
        return abs(expected - actual) <= tolerance["timestamp_sec_absolute"]
    if name in {"timestamp_msec", "duration_msec"}:
        return abs(expected - actual) <= tolerance["msec_absolute"]
    if isinstance(expected, int):
        return expected == actual
    return abs(expected - actual) <= tolerance["float_relative"] * max(1, abs(expected), abs(actual))


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
    return STATUS_DIFFERENT if problems else 0


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
    different_count = vector_count = 0
    for path, content in contents.items():
        for number, vector in enumerate(content["vectors"]):
            vector_count += 1
            problems = replay_in_child(path, number)
            print(
                f"{vector.get('id', number)}: {'DIFFERENT' if problems else 'same'}",
                problems,
                sep="\n",
                end="",
            )
            different_count += bool(problems)
    print(f"{vector_count - different_count} of {vector_count} vectors are the same")
    return 1 if different_count or not vector_count else 0


def replay_in_child(path: str, number: int) -> str:
    """Replay one vector of a file in a separate process and return the differences as lines, empty without a difference."""
    inherited_variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("EXPORTER_") and name not in {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"}
    }
    module_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="replay-") as feed:
        environment = {"EXPORTER_FEED_DIR": feed, "EXPORTER_RUN": "replay", "PYTHONPATH": module_path}
        try:
            completed = subprocess.run(
                [sys.executable, __file__, "--vector", path, str(number)],
                env=inherited_variables | environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"  no end within {TIMEOUT_SECONDS} seconds\n"
    if completed.returncode in {0, STATUS_DIFFERENT}:
        return completed.stdout
    return f"{completed.stdout}  ended with status {completed.returncode}:\n{completed.stderr}"


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "--vector":
        sys.exit(replay_one(sys.argv[2], int(sys.argv[3])))
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print(__doc__)
        sys.exit(0 if sys.argv[1:] else 2)
    sys.exit(replay_all(sys.argv[1:]))
