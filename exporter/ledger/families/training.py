"""Families of the training itself, filled by Stats: progress, phases, checkpoints, model state.

Runs in the sidecar. The processes of the job make Stats of these names (`exporter.training`), which come through the
feed as any Stat does; here is what they are. The names are reserved: a Stat whose main family has one of them is
admitted when it is just that family, so that type, unit and labels are what the metric reference says, whatever a feed
contains.

A family without the label `rank` is the run's: every rank fills it, and what rank 0's process says is published, by the
sidecar that reads it.
"""

from __future__ import annotations

from exporter.families import FamilySpec, FamilyType

IDENTITY_LABELS = ("run", "rank", "worker", "role")
"""The labels that the ledger puts on every series of a process, in the order of the samples."""

_TOTAL = (
    "; absent where the job does not tell, when its totals no longer linger, and while the ledger's state cannot be"
    " written."
)
_GAUGE = "; absent where the job does not tell, when the process is gone or its feed is not refreshed."
_LAST = (
    "; absent where the job does not tell, when the process is gone or its feed is not refreshed, and while no step ends"
    " (goodput.hang_after)."
)
_UNITS = ("seconds", "bytes", "ratio")

HANGING: set[str] = set()
"""Families of last values that go when no step ends."""


def _spec(
    name: str, kind: FamilyType, text: str, labels: tuple[str, ...], source: str, *, last: bool
) -> FamilySpec:
    unit = name.removesuffix("_total").rpartition("_")[2]
    absent = _LAST if last else _GAUGE if kind == "gauge" else _TOTAL
    if last:
        HANGING.add(name)
    if "rank" not in labels:
        absent += " Rank 0's."
    return FamilySpec(name, kind, text + absent, labels, unit if unit in _UNITS else "", source)


def of_rank(
    name: str, kind: FamilyType, text: str, *labels: str, source: str = "", last: bool = False
) -> FamilySpec:
    """A family of each rank."""
    return _spec(name, kind, text, (*IDENTITY_LABELS, *labels), source, last=last)


def of_run(
    name: str, kind: FamilyType, text: str, *labels: str, source: str = "", last: bool = False
) -> FamilySpec:
    """A family of the run."""
    return _spec(name, kind, text, ("run", *labels), source, last=last)


PROGRESS = (
    of_rank(
        "training_steps_total",
        "counter",
        "Steps that were executed, repeated ones included: optimizer steps (train), batches (validation, test)",
        "mode",
        source="ends of training_iteration, validation_iteration and testing_iteration",
    ),
    of_rank(
        "training_samples_total",
        "counter",
        "Samples of this rank's own share, so that the sum over ranks is the run's",
        "mode",
        source="training.record(samples=...), else the configured batch size",
    ),
    of_rank(
        "training_tokens_total",
        "counter",
        "Tokens of this rank's own share, so that the sum over ranks is the run's",
        "mode",
        source="training.record(tokens=...), else samples * sequence length",
    ),
    of_rank(
        "training_microbatches_total",
        "counter",
        "Micro-batches, of which several make a step under gradient accumulation",
        source="training.record(microbatches=...)",
    ),
    of_rank(
        "training_epochs_total", "counter", "Epochs that have ended", source="training.record(epoch=...)"
    ),
    of_run(
        "training_step",
        "gauge",
        "Steps completed as the job counts them, those before this process included; goes back after a restart",
        source="train_iterations_start + completed iterations",
    ),
    of_run(
        "training_step_target",
        "gauge",
        "Step at which the training is to end",
        source="train_iterations_target, training.describe(step_target=...)",
    ),
    of_run("training_epoch", "gauge", "Epoch that is under way", source="training.record(epoch=...)"),
    of_run(
        "training_step_duration_seconds",
        "histogram",
        "Duration of steps",
        "mode",
        source="begin to end of an iteration",
    ),
    of_run(
        "training_step_longest_seconds",
        "gauge",
        "Longest of the last 100 steps without the first",
        source="training_step_duration_seconds",
        last=True,
    ),
    of_run(
        "training_step_ideal_seconds",
        "gauge",
        "Mean of those of the last 200 steps that are no slower than median + 3 * median absolute deviation",
        source="training_step_duration_seconds",
        last=True,
    ),
    of_rank(
        "training_slow_step_excess_seconds_total",
        "counter",
        "Time by which slow steps (above median + 3 * median absolute deviation) were longer than an ideal one",
        source="sum of duration - ideal over slow steps",
    ),
    of_rank(
        "training_last_progress_timestamp_seconds",
        "gauge",
        "Unix time at which the latest step or validation batch ended, from the first one to the end of the training"
        " loop",
        source="end of an iteration",
    ),
    of_rank(
        "training_model_flops_total",
        "counter",
        "Floating-point operations that the model needs for what was trained, forward and backward",
        source="flops_per_token * tokens or flops_per_sample * samples",
    ),
    of_rank(
        "training_hardware_flops_total",
        "counter",
        "Floating-point operations that were executed for it, with what is computed again",
        source="hardware_flops_per_token * tokens",
    ),
    of_rank(
        "training_rank_compute_seconds",
        "gauge",
        "Median over the last 50 steps of the time without waiting for data and for other ranks: what a straggler is"
        " measured by",
        source="step - data_loading - grad_sync",
        last=True,
    ),
)

PHASES = (
    of_rank(
        "training_phase_seconds_total",
        "counter",
        "Time of the main thread by what it did; each moment counts for one phase, so that they sum to wall time",
        "phase",
        source="exclusive time of spans",
    ),
    of_rank("training_phase_entries_total", "counter", "Times that a phase began", "phase", source="spans"),
    of_run(
        "training_phase_duration_seconds",
        "histogram",
        "Duration of phases that recur, without what was done within them",
        "phase",
        source="exclusive time of one span",
    ),
    of_rank(
        "training_phase_active",
        "gauge",
        "1 for the phase in which the main thread is, 0 for those in which it was",
        "phase",
        source="innermost open span of the main thread",
    ),
    of_rank(
        "training_phase_active_since_timestamp_seconds",
        "gauge",
        "Unix time since which the main thread is in its phase",
        source="begin of the innermost open span",
    ),
    of_run(
        "training_background_seconds_total",
        "counter",
        "Time of work beside the training, such as checkpoint_upload, checkpoint_finalize, prefetch, eval_async; in no"
        " phase",
        "task",
        source="training.background(...)",
    ),
)

MODEL = (
    of_run(
        "training_loss", "gauge", "Last finite loss", "mode", source="training.record(loss=...)", last=True
    ),
    of_run(
        "training_grad_norm",
        "gauge",
        "Last finite norm of the gradient",
        source="training.record(grad_norm=...)",
        last=True,
    ),
    of_run(
        "training_learning_rate",
        "gauge",
        "Learning rate",
        source="training.record(learning_rate=...)",
        last=True,
    ),
    of_run(
        "training_loss_scale",
        "gauge",
        "Scale of the loss under mixed precision",
        source="training.record(loss_scale=...)",
        last=True,
    ),
    of_run(
        "training_nonfinite_total",
        "counter",
        "Losses and gradient norms (kind: loss, grad) that were no finite number (value: nan, inf)",
        "kind",
        "value",
        source="training.record(loss=..., grad_norm=...)",
    ),
    of_run(
        "training_skipped_steps_total",
        "counter",
        "Steps without an update of the model (reason: overflow, nonfinite)",
        "reason",
        source="training.skipped_step(...)",
    ),
    of_rank(
        "training_misuse_total",
        "counter",
        "Calls of exporter.training that could not be meant so, by function and by the rule that they broke; each was"
        " logged, and what it would have changed is as before",
        "call",
        "rule",
        source="exporter.training",
    ),
)

CHECKPOINTS = (
    of_run(
        "training_checkpoints_total",
        "counter",
        "Saves by kind (sync, async, local) and result (ok, failed)",
        "kind",
        "result",
        source="checkpoint_save, on_save_checkpoint_*",
    ),
    of_run(
        "training_checkpoint_duration_seconds",
        "histogram",
        "Duration of saves: of what held up the training (part: blocking), and until the save was safe (total)",
        "kind",
        "part",
        source="checkpoint_save, on_save_checkpoint_*",
    ),
    of_run(
        "training_checkpoint_last_success_timestamp_seconds",
        "gauge",
        "Unix time of the latest successful save",
        source="on_save_checkpoint_success",
    ),
    of_run(
        "training_checkpoint_last_step",
        "gauge",
        "Step of the latest successful save",
        source="on_save_checkpoint_success",
    ),
    of_run(
        "training_checkpoint_last_bytes",
        "gauge",
        "Size of the latest successful save",
        source="training.checkpoint_saved(bytes=...)",
    ),
    of_run(
        "training_checkpoint_interval_seconds",
        "gauge",
        "Median time between the last 5 successful saves",
        source="on_save_checkpoint_success",
    ),
)

GPU = (
    of_rank(
        "training_gpu_memory_bytes",
        "gauge",
        "Memory of the GPU as torch's allocator sees it (state: allocated, reserved, peak_allocated, peak_reserved;"
        " peaks since the job last reset them; uuid is unknown before torch 2.4)",
        "gpu",
        "state",
        "uuid",
        source="torch.cuda.memory_stats",
    ),
    of_rank(
        "training_gpu_alloc_retries_total",
        "counter",
        "Allocations that succeeded only after torch had emptied its cache",
        "gpu",
        "uuid",
        source="torch.cuda.memory_stats: num_alloc_retries",
    ),
    of_rank(
        "training_gpu_oom_total",
        "counter",
        "Allocations that failed for want of memory",
        "gpu",
        "uuid",
        source="torch.cuda.memory_stats: num_ooms",
    ),
)

SPECS = (*PROGRESS, *PHASES, *MODEL, *CHECKPOINTS, *GPU)
