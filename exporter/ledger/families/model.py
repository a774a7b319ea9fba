"""Families of loss, skipped steps, invalid calls, checkpoints and torch's allocator, filled by Stats of the job's processes.

The names are reserved: a Stat with such a name is refused, unless it has the type, unit and labels of the family.
"""

from __future__ import annotations

from exporter.ledger.families import IDENTITY_LABELS, RUN_LABELS
from exporter.ledger.families.training_family import (
    GAUGE_ABSENT,
    RUN_GAUGE_ABSENT,
    RUN_LAST_VALUE_ABSENT,
    RUN_POSITION_ABSENT,
    RUN_TOTAL_ABSENT,
    TOTAL_ABSENT,
    Lifetime,
    TrainingFamily,
)

LOSS = TrainingFamily(
    name="training_loss",
    type="gauge",
    labels=(*RUN_LABELS, "mode"),
    help="Latest loss by mode (train, validation, test).",
    absent=f"while the latest loss is NaN or infinite, {RUN_LAST_VALUE_ABSENT}",
    source="training.record(loss=...)",
    lifetime=Lifetime.LAST_VALUE,
)
GRAD_NORM = TrainingFamily(
    name="training_grad_norm",
    type="gauge",
    labels=RUN_LABELS,
    help="Latest gradient norm.",
    absent=f"while the latest gradient norm is NaN or infinite, {RUN_LAST_VALUE_ABSENT}",
    source="training.record(grad_norm=...)",
    lifetime=Lifetime.LAST_VALUE,
)
LEARNING_RATE = TrainingFamily(
    name="training_learning_rate",
    type="gauge",
    labels=RUN_LABELS,
    help="Last recorded learning rate.",
    absent=RUN_LAST_VALUE_ABSENT,
    source="training.record(learning_rate=...)",
    lifetime=Lifetime.LAST_VALUE,
)
LOSS_SCALE = TrainingFamily(
    name="training_loss_scale",
    type="gauge",
    labels=RUN_LABELS,
    help="Last recorded loss scale of mixed precision.",
    absent=RUN_LAST_VALUE_ABSENT,
    source="training.record(loss_scale=...)",
    lifetime=Lifetime.LAST_VALUE,
)
NONFINITE = TrainingFamily(
    name="training_nonfinite_total",
    type="counter",
    labels=(*RUN_LABELS, "kind", "value"),
    help="Losses and gradient norms that were not finite, by kind (loss, grad) and value (nan, inf).",
    absent=RUN_TOTAL_ABSENT,
    source="training.record(loss=..., grad_norm=...)",
)
NONFINITE_SINCE_STEP = TrainingFamily(
    name="training_nonfinite_since_step",
    type="gauge",
    labels=(*RUN_LABELS, "kind"),
    help=(
        "Step of the first of the latest consecutive losses or gradient norms that were not finite, by kind (loss,"
        " grad). Steps are counted from 1."
    ),
    absent=f"while the latest value is finite, {RUN_POSITION_ABSENT}",
    source="training.record(loss=..., grad_norm=...)",
    lifetime=Lifetime.POSITION,
)
NONFINITE_SINCE = TrainingFamily(
    name="training_nonfinite_since_timestamp_seconds",
    type="gauge",
    unit="seconds",
    labels=(*RUN_LABELS, "kind"),
    help=(
        "Unix time of the first of the latest consecutive losses or gradient norms that were not finite, by kind"
        " (loss, grad)."
    ),
    absent=f"while the latest value is finite, {RUN_POSITION_ABSENT}",
    source="training.record(loss=..., grad_norm=...)",
    lifetime=Lifetime.POSITION,
)
SKIPPED_STEPS = TrainingFamily(
    name="training_skipped_steps_total",
    type="counter",
    labels=(*RUN_LABELS, "reason"),
    help="Steps that did not update the model, by reason (overflow, nonfinite).",
    absent=RUN_TOTAL_ABSENT,
    source="training.skipped_step(...)",
)
MISUSE = TrainingFamily(
    name="training_misuse_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "call", "rule"),
    help=(
        "Invalid calls of exporter.training, by function (call) and violated rule. docs/training.md lists the"
        " rules."
    ),
    absent=TOTAL_ABSENT,
    source="exporter.training",
    details=("An invalid call is counted, logged once and ignored.",),
)
CHECKPOINTS = TrainingFamily(
    name="training_checkpoints_total",
    type="counter",
    labels=(*RUN_LABELS, "kind", "result"),
    help="Saves by kind (sync, async, local) and result (ok, failed).",
    absent=RUN_TOTAL_ABSENT,
    source="checkpoint_save, on_save_checkpoint_*",
    details=("A `local` save is lost with the node.",),
)
CHECKPOINT_DURATION = TrainingFamily(
    name="training_checkpoint_duration_seconds",
    type="histogram",
    unit="seconds",
    labels=(*RUN_LABELS, "kind", "part"),
    help=(
        "Duration of saves by kind (sync, async, local) and part. The part total includes blocking: do not"
        " add the two."
    ),
    absent=RUN_TOTAL_ABSENT,
    source="checkpoint_save, on_save_checkpoint_*",
    details=(
        "`blocking`: time for which the training was blocked.",
        "`total`: time until the save was complete.",
    ),
)
CHECKPOINT_LAST_SUCCESS_TIMESTAMP = TrainingFamily(
    name="training_checkpoint_last_success_timestamp_seconds",
    type="gauge",
    unit="seconds",
    labels=RUN_LABELS,
    help="Unix time of the latest successful save, except local saves.",
    absent=RUN_POSITION_ABSENT,
    source="on_save_checkpoint_success",
    lifetime=Lifetime.POSITION,
)
CHECKPOINT_LAST_STEP = TrainingFamily(
    name="training_checkpoint_last_step",
    type="gauge",
    labels=RUN_LABELS,
    help="Highest step of a successful save in the current training loop, except local saves.",
    absent=RUN_POSITION_ABSENT,
    source="on_save_checkpoint_success",
    details=("The latest save may have a lower step, because asynchronous saves may succeed out of order.",),
    lifetime=Lifetime.POSITION,
)
CHECKPOINT_LAST_BYTES = TrainingFamily(
    name="training_checkpoint_last_bytes",
    type="gauge",
    unit="bytes",
    labels=RUN_LABELS,
    help="Size of the latest successful save with a reported size, except local saves.",
    absent=RUN_POSITION_ABSENT,
    source="training.checkpoint_saved(bytes=...)",
    lifetime=Lifetime.POSITION,
)
CHECKPOINT_INTERVAL = TrainingFamily(
    name="training_checkpoint_interval_seconds",
    type="gauge",
    unit="seconds",
    labels=RUN_LABELS,
    help="Median time between the last 5 successful saves, except local saves.",
    absent=RUN_GAUGE_ABSENT,
    source="on_save_checkpoint_success",
)
GPU_MEMORY_BYTES = TrainingFamily(
    name="training_gpu_memory_bytes",
    type="gauge",
    unit="bytes",
    labels=(*IDENTITY_LABELS, "gpu", "state", "uuid"),
    help=(
        "GPU memory of torch's allocator, by state. Reserved memory includes allocated memory: do not sum the"
        " states."
    ),
    absent=GAUGE_ABSENT,
    source="torch.cuda.memory_stats",
    details=(
        "States: `allocated`, `reserved`, `peak_allocated`, `peak_reserved`.",
        "The label `uuid` needs torch 2.4 or later.",
    ),
)
GPU_ALLOC_RETRIES = TrainingFamily(
    name="training_gpu_alloc_retries_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "gpu", "uuid"),
    help="Allocations that torch retried after it had emptied the allocator's cache.",
    absent=TOTAL_ABSENT,
    source="torch.cuda.memory_stats: num_alloc_retries",
    details=("If the retry fails, the allocation also counts in `training_gpu_oom_total`.",),
)
GPU_OOM = TrainingFamily(
    name="training_gpu_oom_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "gpu", "uuid"),
    help="Allocations that failed because the GPU was out of memory.",
    absent=TOTAL_ABSENT,
    source="torch.cuda.memory_stats: num_ooms",
)

SPECS = (
    LOSS,
    GRAD_NORM,
    LEARNING_RATE,
    LOSS_SCALE,
    NONFINITE,
    NONFINITE_SINCE_STEP,
    NONFINITE_SINCE,
    SKIPPED_STEPS,
    MISUSE,
    CHECKPOINTS,
    CHECKPOINT_DURATION,
    CHECKPOINT_LAST_SUCCESS_TIMESTAMP,
    CHECKPOINT_LAST_STEP,
    CHECKPOINT_LAST_BYTES,
    CHECKPOINT_INTERVAL,
    GPU_MEMORY_BYTES,
    GPU_ALLOC_RETRIES,
    GPU_OOM,
)
