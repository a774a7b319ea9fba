"""What the status page tells, as values: the exporter, runs, ranks, GPUs, energy, statistics.

Used in the sidecar, on a worker thread of the web server. A number that nobody has is None, and is shown as missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from exporter.collectors.status import CollectorStatus
from exporter.feed.runs import Job
from exporter.status.history import Point


@dataclass(frozen=True, slots=True)
class About:
    """The exporter itself.

    Attributes:
        version: Its version.
        node: The host's name.
        started: Unix time.
        now: Unix time.
        feed_directory: Where it looks for training processes.
        telemetry_path: Where the metrics are.
        not_ready: Why a scrape is refused, None when it is not.
        silent_jobs: Jobs of `run` that record nothing, each with the reason.
    """

    version: str
    node: str
    started: float
    now: float
    feed_directory: str
    telemetry_path: str
    not_ready: str | None = None
    silent_jobs: Sequence[Job] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
        name: The label `run`.
        facts: What describes it: application, perf_tag, framework, …
        state: What it is in, as `training_run_state` has it; "" where that is not known.
        reason: Why.
        since: Unix time; None where that is not known.
        attempt: Its number.
        attempt_steps: What that has completed.
        step: Position.
        target: Where it is to end.
        step_seconds: Mean of the last minute's steps; None while there were none.
        usual_seconds: Mean of the steps of the last quarter of an hour.
        pace: Mean of the last minutes' steps, and of those of the hour before; None where either is not known.
        save_seconds: Mean of its checkpoints' saves; None before the first.
        loss: The last finite one.
        grad_norm: The same.
        learning_rate: The same.
        nonfinite: Values that were not finite since the run began.
        tokens_per_second: Over the last minute.
        goodput_ratio: Committed work of all wall time.
        uncommitted_seconds: Work that would be lost now.
        checkpoint_at: Unix time of the last successful one.
        badput: Seconds by cause, the largest first.
        restarts: How often it began again.
        joules: On this machine.
        grams: CO2 on this machine.
        costs: Money on this machine, by currency.
        step_history: Seconds a step.
        loss_history: The loss.
    """

    name: str
    facts: Mapping[str, str] = field(default_factory=dict)
    state: str = ""
    reason: str = ""
    since: float | None = None
    attempt: float | None = None
    attempt_steps: float | None = None
    step: float | None = None
    target: float | None = None
    step_seconds: float | None = None
    usual_seconds: float | None = None
    pace: tuple[float, float] | None = None
    save_seconds: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    nonfinite: float | None = None
    tokens_per_second: float | None = None
    goodput_ratio: float | None = None
    uncommitted_seconds: float | None = None
    checkpoint_at: float | None = None
    badput: Sequence[tuple[str, float]] = ()
    restarts: float | None = None
    joules: float | None = None
    grams: float | None = None
    costs: Mapping[str, float] = field(default_factory=dict)
    step_history: Sequence[Point] = ()
    loss_history: Sequence[Point] = ()


@dataclass(frozen=True, slots=True)
class Rank:
    """One training process.

    Attributes:
        run: Its run.
        rank: Its number; "" for a process of no rank.
        worker: Its slot among the processes of one rank; "" for the only one.
        role: What it does.
        node: Where it runs.
        gpu: Which GPU it uses, as the job sees it.
        alive: Whether it lives; None when that is not known.
        updated: Unix time of its last snapshot; None when that is not known.
        phase: What its main thread does; "" when it does not say.
        phase_seconds: For how long it did when it last told; that is not as late as now.
        progress: Unix time of its last step.
        compute_seconds: Its own time in a step, without waiting.
        rivals: Further living processes that train as this rank of the run.
    """

    run: str
    rank: str
    worker: str = ""
    role: str = ""
    node: str = ""
    gpu: str = ""
    alive: bool | None = None
    updated: float | None = None
    phase: str = ""
    phase_seconds: float | None = None
    progress: float | None = None
    compute_seconds: float | None = None
    rivals: float = 0.0

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """What tells it from the others; the role does only where it has no rank."""
        return self.run, self.rank, self.worker, "" if self.rank else self.role


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        index: As the job sees it.
        uuid: Its own.
        name: Model.
        up: Whether it answers; None when that is not known.
        use: Share of time with a kernel.
        tensor: Share of time in which tensor cores work.
        memory_used: Bytes.
        memory_total: Bytes.
        watts: Drawn.
        limit_watts: Allowed.
        celsius: Temperature.
        margin_celsius: To the nearest limit.
        throttled_ratio: Share of the last minute in which heat or the power supply held the clocks back.
        joules: Energy.
        history: Watts.
    """

    index: str
    uuid: str
    name: str = ""
    up: bool | None = None
    use: float | None = None
    tensor: float | None = None
    memory_used: float | None = None
    memory_total: float | None = None
    watts: float | None = None
    limit_watts: float | None = None
    celsius: float | None = None
    margin_celsius: float | None = None
    throttled_ratio: float | None = None
    joules: float | None = None
    history: Sequence[Point] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """Where the energy of a device is read.

    Attributes:
        component: gpu, cpu, dram, soc.
        device: Which.
        name: For people.
        source: What is read.
        measured: False for a model.
    """

    component: str
    device: str
    name: str
    source: str
    measured: bool


@dataclass(frozen=True, slots=True)
class Statistic:
    """A Stat over all its ranks.

    Attributes:
        family: Of its window gauge; of its samples where no window has data.
        ranks: With a feed.
        with_data: Of those, how many had samples in the last window.
        low: Least over ranks.
        high: Greatest over ranks.
        unit: Base unit.
    """

    family: str
    ranks: int
    with_data: int
    low: float | None = None
    high: float | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The node.

    Attributes:
        cpu_ratio: Use of all CPUs.
        cpus: How many.
        memory_used: Bytes.
        memory_total: Bytes.
        cpu_watts: Of all packages.
        gpu_watts: Of all GPUs.
        gpus_expected: How many there should be.
        cpu_history: Use.
    """

    cpu_ratio: float | None = None
    cpus: float | None = None
    memory_used: float | None = None
    memory_total: float | None = None
    cpu_watts: float | None = None
    gpu_watts: float | None = None
    gpus_expected: float | None = None
    cpu_history: Sequence[Point] = ()


@dataclass(frozen=True, slots=True)
class View:
    """The whole page."""

    about: About
    machine: Machine
    runs: Sequence[Run] = ()
    ranks: Sequence[Rank] = ()
    gpus: Sequence[Gpu] = ()
    sources: Sequence[Source] = ()
    statistics: Sequence[Statistic] = ()
    collectors: Sequence[CollectorStatus] = ()
    series: int | None = None
