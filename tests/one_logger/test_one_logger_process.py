"""Processes with training telemetry: examples, exits, crashes, forks, descriptors and a bare interpreter.

A test whose name starts with a number, such as d50, shows that row of the table of defects in docs/one-logger.md.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from places import PROJECT, TESTS
from programs import code_of
from programs import one_logger as programs
from training_support import run_python

PREAMBLE = """
    import os, sys
    from pathlib import Path
    from exporter import one_logger, training
    from exporter.one_logger import *
    from exporter.training import *

    provider = TrainingTelemetryProvider.instance()
    def configure(**fields):
        (provider.with_base_config(OneLoggerConfig(application_name="app", session_tag_or_fn="s", world_size_or_fn=5,
                telemetry_config=dict(perf_tag_or_fn="p", global_batch_size_or_fn=32, log_every_n_train_iterations=10),
                **fields))
            .with_exporter(FileExporter(file_path=Path("telemetry.json")))
            .configure_provider())
"""
"""First lines of a job that configures one-logger with the function `configure`."""

README_EXAMPLE = """
from pathlib import Path
from exporter.one_logger import (
    Attributes, Event, ExportCustomizationMode, FileExporter, OneLoggerConfig, TrainingTelemetryConfig,
    TrainingTelemetryProvider, application, timed_span, training_iteration, training_loop)

num_epochs, dataloader = 2, [(number, number) for number in range(15)]

# Initialize the telemetry provider with a default configuration
base_config = OneLoggerConfig(
    application_name="test_app",
    session_tag_or_fn="test_session",
    world_size_or_fn=5,
)

training_config = TrainingTelemetryConfig(
    world_size_or_fn=5,
    is_log_throughput_enabled_or_fn=True,
    flops_per_sample_or_fn=100,
    global_batch_size_or_fn=32,
    log_every_n_train_iterations=10,
    perf_tag_or_fn="test_perf",
)

# configure the telemetry library and start the main() function
(TrainingTelemetryProvider.instance()
    .with_base_config(base_config)
    .with_exporter(FileExporter(file_path=Path("training_telemetry.json")))
    .with_export_customization(export_customization_mode=ExportCustomizationMode.BLACKLIST_SPANS,
                               span_name_filter=["training_single_iteration"])
    .configure_provider())

@application()
def main() -> None:
    # Set training telemetry config after on_app_start is called
    TrainingTelemetryProvider.instance().set_training_telemetry_config(training_config)
    with training_loop(train_iterations_start=0) as training_span:
        for epoch in range(num_epochs):
            for batch_idx, (inputs, targets) in enumerate(dataloader):
                with training_iteration():
                    pass
        training_span.add_attribute("my_custom_attribute", "my_custom_value")
        with timed_span("my_custom_span", span_attributes=Attributes({"my_custom_attribute": "my_custom_value"})) as s:
            TrainingTelemetryProvider.instance().recorder.event(s, Event.create("my_event"))

main()
"""
"""Example of one-logger's README. Only its imports are changed."""


def records(directory: Path, name: str = "telemetry.json") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / name).read_text(encoding="ascii").splitlines()]


def span_names(directory: Path, *types: str) -> list[str]:
    """Return the names in the records of these types, for example `start` and `stop`."""
    return [record["name"] for record in records(directory) if record["type"] in types]


def run_job(
    code: str, directory: Path, *, status: int = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program in a directory, check its exit status, and return its output."""
    completed = run_python(code, directory, **options)
    assert completed.returncode == status, completed.stderr
    return completed


def test_d50_the_readme_example_of_one_logger_runs_with_only_its_imports_changed(tmp_path: Path) -> None:
    run_job(README_EXAMPLE, tmp_path)

    all_records = records(tmp_path, "training_telemetry.json")
    names = [record.get("name") or record["event"]["name"] for record in all_records]
    assert names[0] == names[-1] == "application"
    assert names.count("training_metrics_update") == 3
    assert {"training_loop", "my_custom_span", "my_event"} <= set(names)
    loop = next(
        record for record in all_records if record["type"] == "stop" and record["name"] == "training_loop"
    )
    assert loop["attributes"]["my_custom_attribute"] == "my_custom_value"
    assert {path.name for path in tmp_path.iterdir()} == {"feed", "job.py", "training_telemetry.json"}


@pytest.mark.timeout(120)
@pytest.mark.skipif(
    not find_spec("nv_one_logger") or not find_spec("torch"), reason="needs the example and torch"
)
def test_d50_one_loggers_own_example_runs_with_only_its_imports_changed(tmp_path: Path) -> None:
    package = find_spec("nv_one_logger.training_telemetry")
    assert package is not None
    assert package.submodule_search_locations is not None
    example = Path(next(iter(package.submodule_search_locations))) / "docs" / "example.py"
    code = re.sub(r"nv_one_logger", "exporter.one_logger", example.read_text("utf-8"))
    run_job(code.replace("num_epochs = 10", "num_epochs = 1"), tmp_path, timeout=110, library="torch")

    names = [
        record.get("name") or record["event"]["name"]
        for record in records(tmp_path, "training_telemetry.json")
    ]
    # After iterations 10, 20 and 30, and at the end after iteration 32.
    assert names.count("training_metrics_update") == 4
    assert names.count("loss_calculation_span") == 32
    assert "save_checkpoint_success" in names


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("sys.exit(3)", 3), ("raise ValueError('it failed')", 1), ("main = 5 / 0", 1)],
)
def test_spans_are_ended_in_the_file_at_an_exit_or_an_exception(
    end: str, status: int, tmp_path: Path
) -> None:
    body = f"""
    configure()
    with application(), training_loop(train_iterations_start=0):
        for _ in range(25):
            with training_iteration():
                pass
        {end}
    """
    run_job(PREAMBLE + body, tmp_path, status=status)

    assert span_names(tmp_path, "stop")[-2:] == ["training_loop", "application"]
    updates = [
        record
        for record in records(tmp_path)
        if record.get("event", {}).get("name") == "training_metrics_update"
    ]
    assert [update["event"]["attributes"]["num_iterations"] for update in updates] == [10, 20, 25]


def test_a_killed_job_leaves_complete_lines(tmp_path: Path) -> None:
    body = """
    import exporter, signal
    configure()
    on_app_start()
    on_train_start(train_iterations_start=0)
    for _ in range(100):
        on_training_single_iteration_start(); on_training_single_iteration_end()
    exporter.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    run_job(PREAMBLE + body, tmp_path, status=-signal.SIGKILL)

    assert "application" in span_names(tmp_path, "start")
    events = [record["event"]["name"] for record in records(tmp_path) if record["type"] == "event"]
    # Of 100 iterations, every tenth is an update.
    assert events == [
        *("one_logger_initialization", "update_training_telemetry_config"),
        *["training_metrics_update"] * 10,
    ]


def test_d49_a_forked_worker_writes_no_records_in_the_name_of_its_parent(tmp_path: Path) -> None:
    run_job(code_of(programs.fork_in_a_training_loop), tmp_path)

    all_records = records(tmp_path)
    assert len({record["pid"] for record in all_records}) == 1
    assert [record["count"] for record in all_records] == list(range(1, len(all_records) + 1))
    assert "of the child" not in span_names(tmp_path, "complete", "start")
    assert "of the parent" in span_names(tmp_path, "complete", "start")


def test_a_child_forked_while_threads_create_span_names_can_create_one(tmp_path: Path) -> None:
    run_job(code_of(programs.fork_while_threads_create_span_names), tmp_path)


def test_a_child_of_multiprocessing_can_configure_itself(tmp_path: Path) -> None:
    body = """
    import multiprocessing
    def work():
        configure()
        with application():
            pass
    if __name__ == "__main__":
        for method in ("fork", "spawn"):
            process = multiprocessing.get_context(method).Process(target=work)
            process.start()
            process.join()
            print(process.exitcode)
    """
    completed = run_job(PREAMBLE + body, tmp_path)

    assert completed.stdout == "0\n0\n"
    all_records = records(tmp_path)
    assert len({record["pid"] for record in all_records}) == 2
    assert sum(record["type"] in {"complete", "stop"} for record in all_records) == 2


def test_d49_four_threads_are_all_counted_and_none_fails(tmp_path: Path) -> None:
    run_job(code_of(programs.open_spans_in_four_threads), tmp_path)

    ends = [record for record in records(tmp_path) if record["type"] in {"complete", "stop"}]
    assert [record["name"] for record in ends] == ["work"] * 2000
    assert len({record["id"] for record in ends}) == 2000


@pytest.mark.parametrize(("is_configured", "is_enabled"), [(False, True), (True, False), (True, True)])
def test_d44_spans_open_no_descriptors(is_configured: bool, is_enabled: bool, tmp_path: Path) -> None:
    run_job(code_of(programs.open_spans_with_few_descriptors, is_configured, is_enabled), tmp_path)


def test_records_have_the_configured_identity(tmp_path: Path) -> None:
    body = """
    import exporter
    exporter.configure(run="mine", rank=5)
    provider.with_exporter(FileExporter(file_path="{run}-{rank}.json"))
    configure()
    with application():
        pass
    """
    run_job(PREAMBLE + body, tmp_path)

    all_records = records(tmp_path, "mine-5.json")
    assert {record["rank"] for record in all_records} == {5}
    first_event = next(record for record in all_records if record["type"] == "event")
    assert first_event["event"]["attributes"]["rank"] == 5


def test_a_process_with_a_hanging_exporter_exits(tmp_path: Path) -> None:
    body = """
    import threading
    class Hanging(FileExporter):
        def export_start(self, span):
            threading.Event().wait()
        close = export_start
    provider.with_exporter(Hanging(file_path="hanging.json"))
    configure()
    with application():
        pass
    """
    run_job(PREAMBLE + body, tmp_path, timeout=60)

    assert span_names(tmp_path, "stop") == ["application"]


def test_d45_importing_every_name_starts_nothing() -> None:
    code = f"import sys; sys.path[:0] = {[str(PROJECT), str(TESTS)]}; {code_of(programs.import_every_name)}"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
