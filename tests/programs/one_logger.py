"""Programs that use the compatibility module of one-logger from threads and forked children.

A program that configures the provider writes its records to `telemetry.json` in the working directory.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exporter import one_logger, training
from exporter.one_logger import (
    DefaultRecorder,
    ExportCustomizationMode,
    FileExporter,
    OneLoggerConfig,
    TrainingTelemetryProvider,
    application,
    on_app_end,
    on_model_init_end,
    timed_span,
    training_iteration,
    training_loop,
)
from exporter.training import kinds, model_forward
from exporter.training.blocks import HotBlock
from exporter.training.recorder import TRAINING


def configure(**fields: Any) -> None:
    """Configure the provider with a file exporter."""
    telemetry = {"perf_tag_or_fn": "p", "global_batch_size_or_fn": 32, "log_every_n_train_iterations": 10}
    config = OneLoggerConfig(
        application_name="app",
        session_tag_or_fn="s",
        world_size_or_fn=5,
        telemetry_config=telemetry,
        **fields,
    )
    provider = TrainingTelemetryProvider.instance()
    provider.with_base_config(config)
    provider.with_exporter(FileExporter(file_path=Path("telemetry.json")))
    provider.configure_provider()


def fork_in_a_training_loop() -> None:
    """Fork in a training loop. Parent and child each open a span."""
    configure()
    with application(), training_loop(train_iterations_start=0):
        with training_iteration():
            pass
        child = os.fork()
        if child == 0:
            with training_iteration(), timed_span("of the child"):
                pass
            on_app_end()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with timed_span("of the parent"):
            pass


def fork_while_threads_create_span_names() -> None:
    """Fork ten times while three threads open spans of new names. Each child opens a span of a new name."""
    configure()
    numbers, stop = itertools.count(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            with timed_span(f"name-{next(numbers)}"):
                pass

    with application():
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for attempt in range(10):
                child = os.fork()
                if child == 0:
                    signal.alarm(60)
                    recorder = DefaultRecorder()
                    recorder.stop(recorder.start(f"child-{attempt}"))
                    with timed_span(f"of the child-{attempt}"):
                        pass
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0, "the child hung"
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def open_spans_in_four_threads() -> None:
    """Open 500 spans, iterations and forward passes in each of four threads."""
    provider = TrainingTelemetryProvider.instance()
    provider.with_export_customization(ExportCustomizationMode.WHITELIST_SPANS, ["work"])
    configure()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(500):
                with timed_span("work") as span:
                    span.add_attribute("a", 1)
                with training_iteration(), model_forward():
                    pass
        except BaseException as error:
            failures.append(error)

    with application():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for failure in failures:
        raise failure


def open_spans_with_few_descriptors(is_configured: bool, is_enabled: bool) -> None:
    """Open 2,000 iterations with only 40 free file descriptors."""
    if is_configured:
        configure(**({} if is_enabled else {"enable_for_current_rank": False}))
    with application(), training_loop(train_iterations_start=0):
        with training_iteration():
            pass
        initial_descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        resource.setrlimit(resource.RLIMIT_NOFILE, (initial_descriptors + 40, initial_descriptors + 40))
        for number in range(2000):
            with training_iteration(), timed_span("mine"):
                pass
            on_model_init_end()  # a misuse
            if number == 1500:
                TrainingTelemetryProvider.instance().force_disable_logging()
        final_descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert final_descriptors <= initial_descriptors + 10, (initial_descriptors, final_descriptors)


def import_every_name() -> None:
    """Import every public name in a bare interpreter, and check that the import loads no heavy package and starts no thread."""
    for module in (one_logger, training):
        for name in module.__all__:
            assert getattr(module, name) is not None, name
    heavy_packages = {"pydantic", "yaml", "torch", "numpy"}
    assert not [name for name in sys.modules if name.split(".")[0] in heavy_packages]
    OneLoggerConfig(application_name="a", world_size_or_fn=1, session_tag_or_fn="s")
    main: Callable[[], int] = training.application()(threading.active_count)
    assert (threading.active_count(), main()) == (1, 2)


def train_with_an_added_phase() -> None:
    """Enter a phase that the table has in a copy of the package, and print its entries and all misuse."""
    kind = kinds.standard_kind("data_transfer")
    assert kind is not None
    configure()
    with application(), training_loop(train_iterations_start=0):
        for _ in range(20):
            with training_iteration():
                with HotBlock(kind):
                    pass
                with timed_span("data_transfer"):
                    pass
                with training.phase("data_transfer"):
                    pass
    TRAINING.drain()
    readings = {
        (reading.definition.name, reading.definition.labels): reading for reading in TRAINING.stat_readings()
    }
    print(readings["training.phase_entries", (("phase", "data_transfer"),)].sum)
    print([labels for name, labels in readings if name == "training.misuse"])
