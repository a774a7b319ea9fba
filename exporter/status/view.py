"""View: from families, history and collectors' statuses to the values of the status page.

Used in the sidecar, on a worker thread of the web server. Nothing here knows HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from exporter.collectors.status import CollectorStatus
from exporter.status import history
from exporter.status.history import KEPT_SECONDS, History
from exporter.status.readings import Readings
from exporter.status.values import About, Gpu, Machine, Rank, Run, Source, Statistic, View

_LAST_WORDS = ("_window_mean", "_window_last", "_window_p50", "_window_added", "_window_max")
"""The window gauges that stand for a statistic, the best first."""


def view(about: About, readings: Readings, past: History, collectors: Sequence[CollectorStatus] = ()) -> View:
    """Look at everything once.

    Args:
        about: The exporter.
        readings: All families.
        past: What was noted of them.
        collectors: How the sources fare.
    """
    ranks = _ranks(readings)
    series = readings.value("exporter_series")
    return View(
        about=about,
        machine=_machine(readings, past),
        runs=_runs(readings, past, ranks),
        ranks=ranks,
        gpus=_gpus(readings, past),
        sources=_sources(readings),
        statistics=_statistics(readings),
        collectors=collectors,
        series=None if series is None else int(series),
    )


def _runs(readings: Readings, past: History, ranks: Sequence[Rank]) -> list[Run]:
    names = {rank.run for rank in ranks if rank.run}
    names |= {labels["run"] for labels, _ in readings.rows("training_wall_seconds_total")}
    return [_run(name, readings, past) for name in sorted(names)]


def _run(name: str, readings: Readings, past: History) -> Run:
    def value(family: str, **labels: str) -> float | None:
        return readings.value(family, run=name, **labels)

    info = next(iter(readings.rows("training_run_info", run=name)), None)
    states = readings.rows("training_run_state", run=name)
    state = next((labels["state"] for labels, holds in states if holds), "")
    why = next((labels for labels, _ in readings.rows("training_run_state_info", run=name)), {})
    saves = [save for _, save in readings.distributions("training_checkpoint_duration_seconds", run=name)]
    means = [save.sum / save.count for save in saves if save.sum and save.count]
    wall, productive = value("training_wall_seconds_total"), value("training_productive_seconds_total")
    causes = [
        (labels["cause"], seconds)
        for labels, seconds in readings.rows("training_badput_seconds_total", run=name)
    ]
    costs: dict[str, float] = {}
    for labels, amount in readings.rows("training_cost_total", run=name):
        costs[labels["currency"]] = costs.get(labels["currency"], 0.0) + amount
    return Run(
        name=name,
        facts={} if info is None else {key: text for key, text in info[0].items() if key != "run" and text},
        state=state,
        reason=why.get("reason", ""),
        since=_number(why.get("since", "")),
        attempt=value("training_attempt"),
        attempt_steps=value("training_attempt_steps"),
        step=value("training_step"),
        target=value("training_step_target"),
        step_seconds=past.recent(history.STEP_SUM, name, per=history.STEP_COUNT),
        usual_seconds=past.recent(history.STEP_SUM, name, per=history.STEP_COUNT, seconds=KEPT_SECONDS),
        pace=past.pace(name),
        save_seconds=max(means, default=None),
        loss=value("training_loss", mode="train"),
        grad_norm=value("training_grad_norm"),
        learning_rate=value("training_learning_rate"),
        nonfinite=readings.total("training_nonfinite_total", run=name),
        tokens_per_second=past.recent(history.TOKENS, name),
        goodput_ratio=productive / wall if wall and productive is not None else None,
        uncommitted_seconds=value("training_uncommitted_seconds"),
        checkpoint_at=value("training_checkpoint_last_success_timestamp_seconds"),
        badput=sorted(
            ((cause, seconds) for cause, seconds in causes if seconds > 0), key=lambda each: -each[1]
        ),
        restarts=readings.total("training_restarts_total", run=name),
        joules=readings.total("training_energy_joules_total", run=name),
        grams=readings.total("training_carbon_grams_total", run=name),
        costs=costs,
        step_history=past.rates(history.STEP_SUM, name, per=history.STEP_COUNT),
        loss_history=past.levels(history.LOSS, name),
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _ranks(readings: Readings) -> list[Rank]:
    found: dict[tuple[str, ...], dict[str, object]] = {}

    def put(labels: Mapping[str, str], **values: object) -> None:
        run, rank, worker = (labels.get(name, "") for name in ("run", "rank", "worker"))
        role = labels.get("role", "")
        known = found.setdefault((run, rank, worker, "" if rank else role), {"role": role})
        known.update(values, run=run, rank=rank, worker=worker)

    for labels, value in readings.rows("training_feed_alive"):
        put(labels, alive=value == 1)
    for labels, value in readings.rows("training_feed_last_update_timestamp_seconds"):
        put(labels, updated=value)
    for labels, _ in readings.rows("training_rank_info"):
        put(labels, role=labels.get("role", ""), node=labels.get("node", ""), gpu=labels.get("gpu", ""))
    for labels, value in readings.rows("training_phase_active"):
        if value == 1:
            put(labels, phase=labels["phase"])
    for labels, value in readings.rows("training_phase_active_since_timestamp_seconds"):
        told = readings.value("training_feed_last_update_timestamp_seconds", **labels)
        put(labels, phase_seconds=None if told is None else max(0.0, told - value))
    for labels, value in readings.rows("training_rank_conflicts"):
        put(labels, rivals=value)
    for family, name in (
        ("training_last_progress_timestamp_seconds", "progress"),
        ("training_rank_compute_seconds", "compute_seconds"),
    ):
        for labels, value in readings.rows(family):
            put(labels, **{name: value})
    ranks = [Rank(**values) for values in found.values()]  # type: ignore[arg-type]  # put under their names above
    return sorted(ranks, key=lambda each: (each.run, each.rank.zfill(12), each.worker, each.role))


def _gpus(readings: Readings, past: History) -> list[Gpu]:
    names = {labels["uuid"]: labels.get("name", "") for labels, _ in readings.rows("gpu_info")}
    found = []
    for labels, up in readings.rows("gpu_up"):
        uuid, index = labels["uuid"], labels["gpu"]

        def value(family: str, uuid: str = uuid, **more: str) -> float | None:
            return readings.value(family, uuid=uuid, **more)

        limit = value("gpu_power_limit_watts", limit="enforced")
        found.append(
            Gpu(
                index=index,
                uuid=uuid,
                name=names.get(uuid, ""),
                up=up == 1,
                use=value("gpu_utilization_ratio"),
                tensor=value("gpu_tensor_activity_ratio", pipe="any"),
                memory_used=value("gpu_memory_used_bytes"),
                memory_total=value("gpu_memory_total_bytes"),
                watts=value("gpu_power_watts"),
                limit_watts=limit,
                celsius=value("gpu_temperature_celsius", sensor="gpu"),
                margin_celsius=value("gpu_temperature_margin_celsius", threshold="nearest"),
                throttled_ratio=past.recent(history.THROTTLED, uuid),
                joules=readings.total("gpu_energy_joules_total", uuid=uuid),
                history=past.levels(history.POWER, uuid),
            )
        )
    return sorted(found, key=lambda each: each.index.zfill(12))


def _sources(readings: Readings) -> list[Source]:
    return [
        Source(
            labels["component"],
            labels["device"],
            labels.get("name", ""),
            labels["source"],
            labels.get("measured") == "true",
        )
        for labels, _ in readings.rows("exporter_energy_source_info")
    ]


def _statistics(readings: Readings) -> list[Statistic]:
    found = []
    for family in sorted(readings.names()):
        if not family.endswith("_window_samples"):
            continue
        samples = [value for _, value in readings.rows(family)]
        stem = family.removesuffix("_window_samples")
        shown, values = family, []
        for words in _LAST_WORDS:
            named = [name for name in readings.names() if name.startswith(stem + words)]
            if named:
                shown = min(named, key=len)
                values = [value for _, value in readings.rows(shown)]
                break
        found.append(
            Statistic(
                family=shown,
                ranks=len(samples),
                with_data=sum(value > 0 for value in samples),
                low=min(values, default=None),
                high=max(values, default=None),
                unit=readings.unit(shown),
            )
        )
    return found


def _machine(readings: Readings, past: History) -> Machine:
    total = readings.value("host_memory_total_bytes")
    available = readings.value("host_memory_available_bytes")
    return Machine(
        cpu_ratio=readings.value("host_cpu_utilization_ratio"),
        cpus=readings.value("host_cpus", kind="online"),
        memory_used=None if total is None or available is None else total - available,
        memory_total=total,
        cpu_watts=readings.total("host_cpu_power_watts"),
        gpu_watts=readings.total("gpu_power_watts"),
        gpus_expected=readings.value("gpu_devices_expected"),
        cpu_history=past.levels(history.CPU),
    )
