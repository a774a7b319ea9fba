"""What one-logger's records of a job ought to be: its rules and formulas a second time, for tests, and nothing else.

Made after the rules, not after `exporter.training`: one thread, no marks, every duration kept in a list. A vector goes in,
the records that it asks for and the steps that are misuse come out; the schema is that of `data/one-logger-golden.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

UNTOLD = {"training_single_iteration", "validation_single_iteration"}
NAMES = {
    "app": "application",
    "distributed_init": "distributed_code_initialization",
    "model_init": "model_initialization",
    "dataloader_init": "data_loader_initialization",
    "optimizer_init": "optimizer_initialization",
    "load_checkpoint": "checkpoint_load",
    "train": "training_loop",
    "training_single_iteration": "training_single_iteration",
    "validation": "validation_loop",
    "validation_single_iteration": "validation_single_iteration",
    "testing": "testing_loop",
}
"""Spans, by what their callbacks are called after."""
BLOCKS = {
    "application": "app",
    "model_init": "model_init",
    "dataloader_init": "dataloader_init",
    "optimizer_init": "optimizer_init",
    "training_loop": "train",
    "training_iteration": "training_single_iteration",
    "validation_loop": "validation",
    "validation_iteration": "validation_single_iteration",
    "testing_loop": "testing",
    "checkpoint_load": "load_checkpoint",
    "checkpoint_save": "save_checkpoint",
}
TELEMETRY: dict[str, Any] = {
    "perf_tag": None,
    "global_batch_size": None,
    "log_every_n_train_iterations": 50,
    "micro_batch_size": None,
    "seq_length": None,
    "flops_per_sample": None,
    "train_iterations_target": None,
    "train_samples_target": None,
    "save_checkpoint_strategy": "sync",
    "is_train_iterations_enabled": True,
    "is_validation_iterations_enabled": True,
    "is_test_iterations_enabled": True,
    "is_save_checkpoint_enabled": True,
    "is_log_throughput_enabled": False,
    "custom_metadata": None,
}
SWITCHES = {
    "training_metrics_update": "is_train_iterations_enabled",
    "validation_metrics_update": "is_validation_iterations_enabled",
    "testing_metrics_update": "is_test_iterations_enabled",
}


class Moment(NamedTuple):
    """One on both clocks."""

    wall: float
    monotonic: float


class Span:
    """One that is open, or was."""

    def __init__(self, name: str, start: Moment, parent: Span | None) -> None:
        self.name = name
        self.start = start
        self.parent = parent
        self.save: dict[str, Any] = {}

    def seconds(self, at: Moment) -> float:
        """What it took, if it ended then."""
        return max(at.monotonic - self.start.monotonic, 0.0)


class Loop:
    """The figures of one training loop, or of the time before the first."""

    def __init__(self, start: int, samples_start: int, began: Moment | None) -> None:
        self.start = start
        self.completed = self.validated = self.tested = start
        self.samples_start = samples_start
        self.began = began
        self.iterations: list[float] = []
        self.validations: list[float] = []
        self.finished: list[float] = []
        self.pending = self.samples = self.flops = 0
        self.tokens: int | None = None
        self.overall: int | None = None
        self.throughput: float | None = None
        self.throughputs: list[float] = []


class Model:
    """One vector."""

    def __init__(self, vector: Mapping[str, Any], clock: Mapping[str, float]) -> None:
        config = vector["config"]
        self.steps = vector["steps"]
        self.clock = clock
        self.offset = 0.0
        self.base: dict[str, Any] = {
            "is_baseline_run": False,
            "custom_metadata": None,
            "summary_data_schema_version": "1.0.0",
        }
        self.base |= {name: value for name, value in config.items() if name != "telemetry"}
        self.enabled = config.get("enable_for_current_rank", True)
        self.telemetry = None if config["telemetry"] is None else TELEMETRY | config["telemetry"]
        self.records: list[dict[str, Any]] = []
        self.misuse: list[int] = []
        self.open: list[Span] = []
        self.entered: list[tuple[str, dict[str, Any], Span | None]] = []
        self.begun: Span | None = None
        self.closed = False
        self._begin_job()

    def run(self) -> tuple[list[dict[str, Any]], list[int]]:
        """Give the records and the steps that are misuse."""
        for step, (seconds, call, arguments) in enumerate(self.steps):
            self.step = step
            wall = self.clock["wall_start_sec"] + seconds + self.offset
            self.now = Moment(wall, self.clock["monotonic_start_sec"] + seconds)
            if call == "set_wall_offset":
                self.offset = arguments["sec"]
            elif call == "set_value":
                self._set(arguments)
            elif self.enabled:
                self._do(call, arguments)
        return self.records, self.misuse

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name in TELEMETRY and self.telemetry is not None:
                self.telemetry[name] = value
            elif name not in TELEMETRY:
                self.base[name] = value

    def _do(self, call: str, arguments: dict[str, Any]) -> None:
        if call == "set_training_telemetry_config":
            if self.telemetry is not None:
                self._refuse()
                return
            self.telemetry = TELEMETRY | arguments
            application = self._find("application")
            if application is not None:
                self._announce(application)
        elif call == "cm_enter":
            given = {name: value for name, value in arguments.items() if name != "name"}
            self._start(BLOCKS[arguments["name"]], given)
            self.entered.append((arguments["name"], given, self.begun))
        elif call == "cm_exit":
            self._exit(arguments["name"], raising=arguments.get("raise", False))
        elif call == "on_save_checkpoint_success":
            self._succeed(arguments["global_step"], self._moment(arguments.get("time_msec")))
        elif call.endswith("_start"):
            self._start(call[3:-6], arguments)
        else:
            self._stop(call[3:-4], self._moment(arguments.get("finish_time_msec")))

    def _exit(self, name: str, *, raising: bool) -> None:
        """An end always closes its own; the end of a block that was refused closes nothing."""
        places = [place for place, (entered, _, _) in enumerate(self.entered) if entered == name]
        if not places:
            return
        _, given, span = self.entered.pop(places[-1])
        if span is None:
            return
        if span not in self.open:
            self._refuse()
            return
        if name == "checkpoint_save" and not raising and self._strategy() == "sync":
            self._succeed(given["global_step"], self.now)
        self._stop(BLOCKS[name], self.now, span, failed=raising)

    # What is told ----------------------------------------------------------------------------------------

    def _refuse(self) -> None:
        self.misuse.append(self.step)

    def _moment(self, milliseconds: float | None) -> Moment:
        """Take any time of the past; one that lies ahead is now."""
        if not milliseconds:
            return self.now
        wall = min(milliseconds / 1000, self.now.wall)
        return Moment(wall, self.now.monotonic - (self.now.wall - wall))

    def _find(self, name: str) -> Span | None:
        return next((span for span in self.open if span.name == name), None)

    def _tell(self, kind: str, span: Span, **more: Any) -> None:
        if span.name not in UNTOLD:
            self.records.append({"step": self.step, "type": kind, "span": span.name, **more})

    def _event(self, span: Span, name: str, attributes: Mapping[str, Any], at: Moment | None = None) -> None:
        if name in SWITCHES and self.telemetry is not None and not self.telemetry[SWITCHES[name]]:
            return
        told = {key: value for key, value in attributes.items() if value is not None}
        told["timestamp_msec"] = int((at or self.now).wall * 1000)
        self._tell("event", span, event=name, attributes=told)

    def _announce(self, application: Span) -> None:
        given = dict(self.telemetry or {})
        if given["is_log_throughput_enabled"] and self.loop.began is None:
            self.loop.overall = 0
        given["checkpoint_strategy"] = given.pop("save_checkpoint_strategy")
        given["custom_metadata"] = _listed(given["custom_metadata"])
        self._event(application, "update_training_telemetry_config", given)

    # Starts ----------------------------------------------------------------------------------------------

    def _begin_job(self) -> None:
        self.loop = Loop(0, 0, None)
        self.saves: dict[int, Span] = {}
        self.save_seconds: list[float] = []
        self.attempts = self.successes = 0
        self.first_success: float | None = None
        self.furthest: dict[str, Any] | None = None

    def _strategy(self) -> str:
        return "sync" if self.telemetry is None else str(self.telemetry["save_checkpoint_strategy"])

    def _saves_are_off(self) -> bool:
        return self.telemetry is not None and not self.telemetry["is_save_checkpoint_enabled"]

    def _begin(self, name: str, at: Moment, attributes: Mapping[str, Any] | None = None) -> Span:
        self.begun = span = Span(name, at, self.open[-1] if self.open else None)
        self.open.append(span)
        told = {key: value for key, value in (attributes or {}).items() if value is not None}
        self._tell(
            "span_start", span, parent=None if span.parent is None else span.parent.name, attributes=told
        )
        return span

    def _start(self, what: str, given: Mapping[str, Any]) -> None:
        at, self.begun = self._moment(given.get("start_time_msec")), None
        if what == "save_checkpoint" and self._saves_are_off():
            return
        name = NAMES.get(what, f"checkpoint_save_{self._strategy()}")
        trains = what in {"train", "save_checkpoint"}
        if self._find(name) or (self.closed and what != "app") or (trains and self.telemetry is None):
            self._refuse()
        elif what == "app":
            self._begin_application(at)
        elif what == "train":
            self._begin_loop(given, at)
        elif what == "save_checkpoint":
            self._begin_save(name, given["global_step"], at)
        else:
            self._begin(name, at)

    def _begin_application(self, at: Moment) -> None:
        if self.closed:
            self.closed = False
            self._begin_job()
        application = self._begin("application", at)
        names = ("world_size", "session_tag", "is_baseline_run", "summary_data_schema_version")
        told = {name: self.base[name] for name in names}
        told |= {"enable_for_current_rank": True, "rank": 0}
        told["custom_metadata"] = _listed(self.base["custom_metadata"])
        self._event(application, "one_logger_initialization", told, at)
        if self.telemetry is not None:
            self._announce(application)

    def _begin_loop(self, given: Mapping[str, Any], at: Moment) -> None:
        telemetry = self.telemetry or {}
        start, samples = given["train_iterations_start"], given.get("train_samples_start")
        if samples is None:
            samples = start * telemetry["global_batch_size"]
        if start < 0 or samples < 0:
            self._refuse()
            return
        targets = {}
        for name in ("train_iterations_target", "train_samples_target"):
            asked = given.get(f"{name}_or_fn")
            targets[name] = telemetry[name] if asked is None else asked
        tokens = telemetry["seq_length"] and targets["train_samples_target"]
        self.loop, self.furthest = Loop(start, samples, at), None
        if telemetry["is_log_throughput_enabled"]:
            self.loop.overall = start * telemetry["global_batch_size"] * telemetry["flops_per_sample"]
        attributes = {
            "train_iterations_start": start,
            "train_samples_start": samples,
            "train_tokens_target": telemetry["seq_length"] * targets["train_samples_target"]
            if tokens
            else None,
            "completed_floating_point_operations_overall": self.loop.overall,
        }
        self._begin("training_loop", at, attributes | targets)

    def _begin_save(self, name: str, step: int, at: Moment) -> None:
        self.attempts += 1
        attributes = {
            "checkpoint_strategy": self._strategy(),
            "current_iteration": step,
            "save_checkpoint_attempt_count": self.attempts,
        }
        span, loop = self._begin(name, at, attributes), self.loop
        span.save = {
            "order": (loop.completed, self.attempts),
            "productive_train_iterations": loop.completed,
            "productive_train_samples": loop.samples_start + loop.samples,
            "productive_train_iterations_sec": sum(loop.iterations, 0.0),
            "productive_validation_iterations_sec": sum(loop.validations, 0.0),
            "productive_train_tflops": None if loop.overall is None else loop.overall / 1e12,
        }
        self.saves[step] = span

    def _succeed(self, step: int, at: Moment) -> None:
        if self._saves_are_off():
            return
        asynchronous = self._strategy() == "async"
        holder = self._find("application" if asynchronous else "checkpoint_save_sync")
        if holder is None or self.telemetry is None or step not in self.saves:
            self._refuse()
            return
        save = self.saves.pop(step).save
        self.successes += 1
        self.first_success = at.wall if self.first_success is None else self.first_success
        if self.furthest is None or save["order"] > self.furthest["order"]:
            self.furthest = save
        attributes = {
            "checkpoint_strategy": self._strategy(),
            "current_iteration": step,
            "first_successful_save_checkpoint_timestamp_sec": self.first_success,
            "latest_successful_save_checkpoint_timestamp_sec": at.wall,
            "save_checkpoint_success_count": self.successes,
            "training_start_timestamp_sec": None if self.loop.began is None else self.loop.began.wall,
            **{name: value for name, value in self.furthest.items() if name != "order"},
        }
        self._event(holder, "save_checkpoint_success", attributes, at)

    # Ends ------------------------------------------------------------------------------------------------

    def _stop(self, what: str, at: Moment, span: Span | None = None, *, failed: bool = False) -> None:
        if span is None:
            if what == "save_checkpoint" and self._saves_are_off():
                return
            span = self._find(NAMES.get(what, f"checkpoint_save_{self._strategy()}"))
        if span is None:
            self._refuse()
            return
        if what == "app":
            self._close(span, at)
        elif what == "train":
            self._update(span)
        elif what == "training_single_iteration" and not failed:
            self._complete(span, at)
        elif what == "validation_single_iteration" and not failed:
            self.loop.validations.append(span.seconds(at))
        elif what == "validation":
            self._validated(span)
        elif what == "testing":
            self._tested(span)
        elif what == "save_checkpoint":
            self._saved(span, at, failed=failed)
        self._end(span, at)

    def _end(self, span: Span, at: Moment) -> None:
        self.open.remove(span)
        self._tell("span_stop", span, duration_msec=round(span.seconds(at) * 1000))

    def _close(self, application: Span, at: Moment) -> None:
        """The innermost first, the application last; no statistics but those of the loop that were not told yet."""
        for span in reversed(self.open.copy()):
            if span is not application:
                if span.name == "training_loop":
                    self._update(span)
                self._tell("error", span)
                self._end(span, at)
        self.closed = True

    def _complete(self, span: Span, at: Moment) -> None:
        around, loop, telemetry = self._find("training_loop"), self.loop, self.telemetry
        if around is None or telemetry is None:
            self._refuse()
            return
        seconds, batch = span.seconds(at), telemetry["global_batch_size"]
        loop.completed += 1
        loop.pending += 1
        loop.samples += batch
        loop.iterations.append(seconds)
        loop.finished.append(at.wall)
        if telemetry["seq_length"]:
            loop.tokens = (loop.tokens or 0) + batch * telemetry["seq_length"]
        if telemetry["is_log_throughput_enabled"]:
            flops, share = batch * telemetry["flops_per_sample"], 1e12 * self.base["world_size"]
            loop.flops += flops
            loop.overall = (loop.overall or 0) + flops
            if sum(loop.iterations) > 0:
                loop.throughput = loop.flops / (sum(loop.iterations) * share)
            if seconds > 0:
                loop.throughputs.append(flops / (seconds * share))
        if loop.completed % telemetry["log_every_n_train_iterations"] == 0:
            self._update(around)

    def _update(self, span: Span) -> None:
        loop = self.loop
        if not loop.pending:
            return
        attributes = {
            "train_iterations_start": loop.start,
            "current_iteration": loop.completed - 1,
            "num_iterations": len(loop.iterations),
            "train_samples_start": loop.samples_start,
            "num_train_samples": loop.samples,
            "interval": loop.pending,
            **_statistics(loop.iterations),
            "train_tokens": loop.tokens,
            "completed_floating_point_operations_overall": loop.overall,
            "total_flops": loop.flops,
            "train_throughput_per_gpu": loop.throughput,
            "train_throughput_per_gpu_max": max(loop.throughputs, default=None),
            "train_throughput_per_gpu_min": min(loop.throughputs, default=None),
            "first_logged_train_iterations_finish_timestamp_sec": loop.finished[0],
            "last_logged_train_iterations_finish_timestamp_sec": loop.finished[-1],
        }
        loop.pending = 0
        self._event(span, "training_metrics_update", attributes)

    def _validated(self, span: Span) -> None:
        loop = self.loop
        attributes = {
            "current_iteration": max(0, loop.completed - 1),
            "interval": loop.completed - loop.validated,
        }
        loop.validated = loop.completed
        self._event(span, "validation_metrics_update", attributes | _statistics(loop.validations))

    def _tested(self, span: Span) -> None:
        loop = self.loop
        attributes = {
            "current_iteration": max(0, loop.completed - 1),
            "interval": loop.completed - loop.tested,
        }
        loop.tested = loop.completed
        self._event(span, "testing_metrics_update", attributes)

    def _saved(self, span: Span, at: Moment, *, failed: bool) -> None:
        if failed or self._strategy() == "sync":
            self.saves = {step: save for step, save in self.saves.items() if save is not span}
        self.save_seconds.append(span.seconds(at))
        attributes = {
            "save_checkpoint_sync_time_total_sec": sum(self.save_seconds),
            "save_checkpoint_sync_time_min_sec": min(self.save_seconds),
            "save_checkpoint_sync_time_max_sec": max(self.save_seconds),
        }
        self._event(span, "sync_checkpoint_metrics_update", attributes)


def _statistics(durations: list[float]) -> dict[str, float]:
    if not durations:
        return {}
    return {
        "avg_iteration_time_sec": sum(durations) / len(durations),
        "min_iteration_time_sec": min(durations),
        "max_iteration_time_sec": max(durations),
        "total_iteration_time_sec": sum(durations),
    }


def _listed(metadata: Mapping[str, Any] | None) -> list[str] | None:
    return None if metadata is None else [f"{name}:{value}" for name, value in metadata.items()]
