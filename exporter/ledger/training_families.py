"""Families of the training itself, as the process of each rank counts them: progress, phases, checkpoints, model state.

Filled by Stats of the same name that `exporter.training` makes in each process of the job, as any Stat through the
feed; here is what they are. A family without the label `rank` is the run's: every rank fills it, and rank 0's is
published, by the sidecar that reads it. What only a sidecar can count, since it outlives the processes, is in
`goodput_families`.
"""

from __future__ import annotations

from exporter.collectors.family import FamilySpec
from exporter.ledger.identity_labels import IDENTITY_LABELS

_TOLD = "; absent where the job does not tell, when its totals no longer linger, and while the ledger's state cannot be written."
_LIVES = "; absent where the job does not tell, when the process is gone or its feed is not refreshed."
_RANK_0 = " Rank 0's."

STEPS = FamilySpec(
    "training_steps_total",
    "counter",
    "Steps that were executed, repeated ones included: optimizer steps (train), batches (validation, test)"
    + _TOLD,
    (*IDENTITY_LABELS, "mode"),
    source="ends of training_iteration, validation_iteration and testing_iteration",
)
SAMPLES = FamilySpec(
    "training_samples_total",
    "counter",
    "Samples of this rank's own share, so that the sum over ranks is the run's" + _TOLD,
    (*IDENTITY_LABELS, "mode"),
    source="training.record(samples=...), else the configured batch size",
)
TOKENS = FamilySpec(
    "training_tokens_total",
    "counter",
    "Tokens of this rank's own share, so that the sum over ranks is the run's" + _TOLD,
    (*IDENTITY_LABELS, "mode"),
    source="training.record(tokens=...), else samples * sequence length",
)
MICROBATCHES = FamilySpec(
    "training_microbatches_total",
    "counter",
    "Micro-batches, of which several make a step under gradient accumulation" + _TOLD,
    IDENTITY_LABELS,
    source="training.record(microbatches=...)",
)
EPOCHS = FamilySpec(
    "training_epochs_total",
    "counter",
    "Epochs that have ended" + _TOLD,
    IDENTITY_LABELS,
    source="training.record(epoch=...)",
)
STEP = FamilySpec(
    "training_step",
    "gauge",
    "Steps completed as the job counts them, those before this process included; goes back after a restart"
    + _LIVES
    + _RANK_0,
    ("run",),
    source="train_iterations_start + completed iterations",
)
STEP_TARGET = FamilySpec(
    "training_step_target",
    "gauge",
    "Step at which the training is to end" + _LIVES + _RANK_0,
    ("run",),
    source="train_iterations_target, training.describe(step_target=...)",
)
EPOCH = FamilySpec(
    "training_epoch",
    "gauge",
    "Epoch that is under way" + _LIVES + _RANK_0,
    ("run",),
    source="training.record(epoch=...)",
)
STEP_DURATION = FamilySpec(
    "training_step_duration_seconds",
    "histogram",
    "Duration of steps" + _TOLD + _RANK_0,
    ("run", "mode"),
    "seconds",
    "begin to end of an iteration",
)
STEP_LONGEST = FamilySpec(
    "training_step_longest_seconds",
    "gauge",
    "Longest of the last 100 steps without the first: what a hang is measured by" + _LIVES + _RANK_0,
    ("run",),
    "seconds",
    "training_step_duration_seconds",
)
STEP_IDEAL = FamilySpec(
    "training_step_ideal_seconds",
    "gauge",
    "Mean of those of the last 200 steps that are no slower than median + 3 * median absolute deviation"
    + _LIVES
    + _RANK_0,
    ("run",),
    "seconds",
    "training_step_duration_seconds",
)
SLOW_STEP_EXCESS = FamilySpec(
    "training_slow_step_excess_seconds_total",
    "counter",
    "Time by which slow steps (above median + 3 * median absolute deviation) were longer than an ideal one"
    + _TOLD,
    IDENTITY_LABELS,
    "seconds",
    "sum of duration - ideal over slow steps",
)
LAST_PROGRESS = FamilySpec(
    "training_last_progress_timestamp_seconds",
    "gauge",
    "Unix time at which the latest step or validation batch ended; absent before the first, after the training loop,"
    " when the process is gone or its feed is not refreshed.",
    IDENTITY_LABELS,
    "seconds",
    "end of an iteration",
)
PHASE_SECONDS = FamilySpec(
    "training_phase_seconds_total",
    "counter",
    "Time of the main thread by what it did; each moment counts for one phase, so that they sum to wall time"
    + _TOLD,
    (*IDENTITY_LABELS, "phase"),
    "seconds",
    "exclusive time of spans",
)
PHASE_ENTRIES = FamilySpec(
    "training_phase_entries_total",
    "counter",
    "Times that a phase began" + _TOLD,
    (*IDENTITY_LABELS, "phase"),
    source="spans",
)
PHASE_DURATION = FamilySpec(
    "training_phase_duration_seconds",
    "histogram",
    "Duration of phases that recur, without what was done within them" + _TOLD + _RANK_0,
    ("run", "phase"),
    "seconds",
    "exclusive time of one span",
)
PHASE_ACTIVE = FamilySpec(
    "training_phase_active",
    "gauge",
    "1 for the phase in which the main thread is, 0 for those in which it was" + _LIVES,
    (*IDENTITY_LABELS, "phase"),
    source="innermost open span of the main thread",
)
PHASE_SINCE = FamilySpec(
    "training_phase_active_since_timestamp_seconds",
    "gauge",
    "Unix time since which the main thread is in its phase" + _LIVES,
    IDENTITY_LABELS,
    "seconds",
    "begin of the innermost open span",
)
BACKGROUND = FamilySpec(
    "training_background_seconds_total",
    "counter",
    "Time of work beside the training, such as checkpoint_upload, checkpoint_finalize, prefetch, eval_async; in no"
    " phase" + _TOLD + _RANK_0,
    ("run", "task"),
    "seconds",
    "training.background(...)",
)
MODEL_FLOPS = FamilySpec(
    "training_model_flops_total",
    "counter",
    "Floating-point operations that the model needs for what was trained, forward and backward" + _TOLD,
    IDENTITY_LABELS,
    source="flops_per_token * tokens or flops_per_sample * samples",
)
HARDWARE_FLOPS = FamilySpec(
    "training_hardware_flops_total",
    "counter",
    "Floating-point operations that were executed for it, with what is computed again" + _TOLD,
    IDENTITY_LABELS,
    source="hardware_flops_per_token * tokens",
)
RANK_COMPUTE = FamilySpec(
    "training_rank_compute_seconds",
    "gauge",
    "Median over the last 50 steps of the time without waiting for data and for other ranks: what a straggler is"
    " measured by" + _LIVES,
    IDENTITY_LABELS,
    "seconds",
    "step - data_loading - grad_sync",
)
LOSS = FamilySpec(
    "training_loss",
    "gauge",
    "Last finite loss" + _LIVES + _RANK_0,
    ("run", "mode"),
    source="training.record(loss=...)",
)
GRAD_NORM = FamilySpec(
    "training_grad_norm",
    "gauge",
    "Last finite norm of the gradient" + _LIVES + _RANK_0,
    ("run",),
    source="training.record(grad_norm=...)",
)
LEARNING_RATE = FamilySpec(
    "training_learning_rate",
    "gauge",
    "Learning rate" + _LIVES + _RANK_0,
    ("run",),
    source="training.record(learning_rate=...)",
)
LOSS_SCALE = FamilySpec(
    "training_loss_scale",
    "gauge",
    "Scale of the loss under mixed precision" + _LIVES + _RANK_0,
    ("run",),
    source="training.record(loss_scale=...)",
)
NONFINITE = FamilySpec(
    "training_nonfinite_total",
    "counter",
    "Losses and gradient norms (kind: loss, grad) that were no finite number (value: nan, inf)"
    + _TOLD
    + _RANK_0,
    ("run", "kind", "value"),
    source="training.record(loss=..., grad_norm=...)",
)
SKIPPED_STEPS = FamilySpec(
    "training_skipped_steps_total",
    "counter",
    "Steps without an update of the model (reason: overflow, nonfinite)" + _TOLD + _RANK_0,
    ("run", "reason"),
    source="training.skipped_step(...)",
)
CHECKPOINTS = FamilySpec(
    "training_checkpoints_total",
    "counter",
    "Saves by kind (sync, async, local) and result (ok, failed)" + _TOLD + _RANK_0,
    ("run", "kind", "result"),
    source="checkpoint_save, on_save_checkpoint_*",
)
CHECKPOINT_DURATION = FamilySpec(
    "training_checkpoint_duration_seconds",
    "histogram",
    "Duration of saves: of what held up the training (part: blocking), and until the save was safe (total)"
    + _TOLD
    + _RANK_0,
    ("run", "kind", "part"),
    "seconds",
    "checkpoint_save, on_save_checkpoint_*",
)
CHECKPOINT_TIME = FamilySpec(
    "training_checkpoint_last_success_timestamp_seconds",
    "gauge",
    "Unix time of the latest successful save" + _LIVES + _RANK_0,
    ("run",),
    "seconds",
    "on_save_checkpoint_success",
)
CHECKPOINT_STEP = FamilySpec(
    "training_checkpoint_last_step",
    "gauge",
    "Step of the latest successful save" + _LIVES + _RANK_0,
    ("run",),
    source="on_save_checkpoint_success",
)
CHECKPOINT_BYTES = FamilySpec(
    "training_checkpoint_last_bytes",
    "gauge",
    "Size of the latest successful save" + _LIVES + _RANK_0,
    ("run",),
    "bytes",
    "training.checkpoint_saved(bytes=...)",
)
CHECKPOINT_INTERVAL = FamilySpec(
    "training_checkpoint_interval_seconds",
    "gauge",
    "Median time between the last 5 successful saves" + _LIVES + _RANK_0,
    ("run",),
    "seconds",
    "on_save_checkpoint_success",
)
MISUSE = FamilySpec(
    "training_misuse_total",
    "counter",
    "Calls of exporter.training that could not be meant so, by function and by the rule that they broke; each was"
    " logged, and what it would have changed is as before" + _TOLD,
    (*IDENTITY_LABELS, "call", "rule"),
    source="exporter.training",
)
GPU_MEMORY = FamilySpec(
    "training_gpu_memory_bytes",
    "gauge",
    "Memory of the GPU as torch's allocator sees it (state: allocated, reserved, peak_allocated, peak_reserved; peaks"
    " since the job last reset them; uuid is unknown before torch 2.4)" + _LIVES,
    (*IDENTITY_LABELS, "gpu", "state", "uuid"),
    "bytes",
    "torch.cuda.memory_stats",
)
GPU_ALLOC_RETRIES = FamilySpec(
    "training_gpu_alloc_retries_total",
    "counter",
    "Allocations that succeeded only after torch had emptied its cache" + _TOLD,
    (*IDENTITY_LABELS, "gpu", "uuid"),
    source="torch.cuda.memory_stats: num_alloc_retries",
)
GPU_OOM = FamilySpec(
    "training_gpu_oom_total",
    "counter",
    "Allocations that failed for want of memory" + _TOLD,
    (*IDENTITY_LABELS, "gpu", "uuid"),
    source="torch.cuda.memory_stats: num_ooms",
)

SPECS = (
    STEPS,
    SAMPLES,
    TOKENS,
    MICROBATCHES,
    EPOCHS,
    STEP,
    STEP_TARGET,
    EPOCH,
    STEP_DURATION,
    STEP_LONGEST,
    STEP_IDEAL,
    SLOW_STEP_EXCESS,
    LAST_PROGRESS,
    PHASE_SECONDS,
    PHASE_ENTRIES,
    PHASE_DURATION,
    PHASE_ACTIVE,
    PHASE_SINCE,
    BACKGROUND,
    MODEL_FLOPS,
    HARDWARE_FLOPS,
    RANK_COMPUTE,
    LOSS,
    GRAD_NORM,
    LEARNING_RATE,
    LOSS_SCALE,
    NONFINITE,
    SKIPPED_STEPS,
    CHECKPOINTS,
    CHECKPOINT_DURATION,
    CHECKPOINT_TIME,
    CHECKPOINT_STEP,
    CHECKPOINT_BYTES,
    CHECKPOINT_INTERVAL,
    MISUSE,
    GPU_MEMORY,
    GPU_ALLOC_RETRIES,
    GPU_OOM,
)
