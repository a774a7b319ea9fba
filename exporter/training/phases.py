"""Phases into which the time of the main thread is divided. A row has all properties of a phase."""

from __future__ import annotations

from exporter.recording.value_class import Value, value_class


@value_class
class Phase(Value):
    """Phase: a value of the label `phase`, with its properties."""

    name: str
    work: bool = False  # True if the time is work, which a checkpoint can preserve
    waiting: bool = False  # True if the rank waits for data or for other ranks
    recurring: bool = False  # True if the durations have a histogram
    badput: str | None = "other"  # cause of the lost time, a value of the label `cause`; None for work


PHASES: dict[str, Phase] = {
    row.name: row
    for row in (
        Phase("init", badput="init"),
        Phase("rendezvous", badput="init"),
        Phase("model_init", badput="init"),
        Phase("optimizer_init", badput="init"),
        Phase("dataloader_init", badput="init"),
        Phase("compile", badput="compile"),
        Phase("checkpoint_load", badput="checkpoint_load"),
        Phase("data_loading", waiting=True, recurring=True, badput="data_stall"),
        Phase("iteration", work=True, badput=None),  # time of an iteration outside the inner phases
        Phase("forward", work=True, recurring=True, badput=None),
        Phase("backward", work=True, recurring=True, badput=None),
        Phase("grad_sync", work=True, waiting=True, recurring=True, badput=None),
        Phase("optimizer", work=True, recurring=True, badput=None),
        Phase("zero_grad", work=True, recurring=True, badput=None),
        Phase("checkpoint_save_sync", recurring=True, badput="checkpoint_save"),
        Phase("checkpoint_save_async", recurring=True, badput="checkpoint_save"),
        Phase("validation", recurring=True, badput="validation"),
        Phase("test", recurring=True, badput="validation"),
        Phase("logging", recurring=True),
        Phase("restart", badput="init"),
        Phase("other"),  # after the first step, where no phase is open
    )
}
"""All phases by name."""

WORK_PHASES = frozenset(row.name for row in PHASES.values() if row.work)
"""Names of the phases that are work."""
