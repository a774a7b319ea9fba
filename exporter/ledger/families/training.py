"""Families of steps and phases, filled by Stats of the job's processes.

The names are reserved: a Stat with such a name is refused, unless it has the type, unit and labels of the family.
"""

from __future__ import annotations

from exporter.ledger.families import IDENTITY_LABELS, RUN_LABELS
from exporter.ledger.families.training_family import (
    GAUGE_ABSENT,
    LAST_VALUE_ABSENT,
    RUN_LAST_VALUE_ABSENT,
    RUN_POSITION_ABSENT,
    RUN_TOTAL_ABSENT,
    TOTAL_ABSENT,
    Lifetime,
    TrainingFamily,
)

STEPS = TrainingFamily(
    name="training_steps_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "mode"),
    help=(
        "Executed steps, including repeated steps, by mode: optimizer steps (train) or batches (validation,"
        " test)."
    ),
    absent=TOTAL_ABSENT,
    source="ends of training_iteration, validation_iteration and testing_iteration",
)
SAMPLES = TrainingFamily(
    name="training_samples_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "mode"),
    help=(
        "Samples that this rank processed, by mode (train, validation, test). The sum over all ranks is the"
        " total of the run."
    ),
    absent=TOTAL_ABSENT,
    source="training.record(samples=...), otherwise the configured batch size",
)
TOKENS = TrainingFamily(
    name="training_tokens_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "mode"),
    help=(
        "Tokens that this rank processed, by mode (train, validation, test). The sum over all ranks is the"
        " total of the run."
    ),
    absent=TOTAL_ABSENT,
    source="training.record(tokens=...), otherwise samples * sequence length",
)
MICROBATCHES = TrainingFamily(
    name="training_microbatches_total",
    type="counter",
    labels=IDENTITY_LABELS,
    help="Micro-batches. With gradient accumulation, a step has several micro-batches.",
    absent=TOTAL_ABSENT,
    source="training.record(microbatches=...)",
)
EPOCHS = TrainingFamily(
    name="training_epochs_total",
    type="counter",
    labels=IDENTITY_LABELS,
    help="Finished epochs.",
    absent=TOTAL_ABSENT,
    source="training.record(epoch=...)",
)
STEP = TrainingFamily(
    name="training_step",
    type="gauge",
    labels=RUN_LABELS,
    help=(
        "Completed steps as counted by the job, including the steps of earlier processes. Decreases after a"
        " restart from a checkpoint."
    ),
    absent=RUN_POSITION_ABSENT,
    source="train_iterations_start + completed iterations",
    lifetime=Lifetime.POSITION,
)
STEP_TARGET = TrainingFamily(
    name="training_step_target",
    type="gauge",
    labels=RUN_LABELS,
    help="Step at which the training ends.",
    absent=RUN_POSITION_ABSENT,
    source="train_iterations_target, training.describe(step_target=...)",
    lifetime=Lifetime.POSITION,
)
EPOCH = TrainingFamily(
    name="training_epoch",
    type="gauge",
    labels=RUN_LABELS,
    help="Current epoch.",
    absent=RUN_POSITION_ABSENT,
    source="training.record(epoch=...)",
    lifetime=Lifetime.POSITION,
)
STEP_DURATION = TrainingFamily(
    name="training_step_duration_seconds",
    type="histogram",
    unit="seconds",
    labels=(*RUN_LABELS, "mode"),
    help="Duration of steps by mode: optimizer steps (train) or batches (validation, test).",
    absent=RUN_TOTAL_ABSENT,
    source="start to end of an iteration",
)
STEP_LONGEST = TrainingFamily(
    name="training_step_longest_seconds",
    type="gauge",
    unit="seconds",
    labels=RUN_LABELS,
    help="Duration of the longest of the last 100 steps, except the first step of the process.",
    absent=RUN_LAST_VALUE_ABSENT,
    source="training_step_duration_seconds",
    lifetime=Lifetime.LAST_VALUE,
)
STEP_IDEAL = TrainingFamily(
    name="training_step_ideal_seconds",
    type="gauge",
    unit="seconds",
    labels=RUN_LABELS,
    help="Mean duration of the last 200 steps, without slow steps.",
    absent=RUN_LAST_VALUE_ABSENT,
    source="training_step_duration_seconds",
    details=("A step is slow if it takes longer than median + 3 * median absolute deviation.",),
    lifetime=Lifetime.LAST_VALUE,
)
SLOW_STEP_EXCESS = TrainingFamily(
    name="training_slow_step_excess_seconds_total",
    type="counter",
    unit="seconds",
    labels=IDENTITY_LABELS,
    help="Time by which slow steps exceeded training_step_ideal_seconds.",
    absent=TOTAL_ABSENT,
    source="sum of duration - ideal over slow steps",
    details=("A step is slow if it takes longer than median + 3 * median absolute deviation.",),
)
LAST_PROGRESS_TIMESTAMP = TrainingFamily(
    name="training_last_progress_timestamp_seconds",
    type="gauge",
    unit="seconds",
    labels=IDENTITY_LABELS,
    help="Unix time of the end of the latest step or validation batch.",
    absent="*not reported*, between the end of the training loop and the exit, *stale*, or *expired*",
    source="end of an iteration",
    lifetime=Lifetime.POSITION,
)
MODEL_FLOPS = TrainingFamily(
    name="training_model_flops_total",
    type="counter",
    labels=IDENTITY_LABELS,
    help="Floating-point operations that the forward and backward passes of the model require, in FLOP.",
    absent=TOTAL_ABSENT,
    source="flops_per_token * tokens or flops_per_sample * samples",
)
HARDWARE_FLOPS = TrainingFamily(
    name="training_hardware_flops_total",
    type="counter",
    labels=IDENTITY_LABELS,
    help=(
        "Executed floating-point operations, including recomputation, in FLOP. Contains"
        " training_model_flops_total: do not add the two."
    ),
    absent=TOTAL_ABSENT,
    source="hardware_flops_per_token * tokens",
)
RANK_COMPUTE = TrainingFamily(
    name="training_rank_compute_seconds",
    type="gauge",
    unit="seconds",
    labels=IDENTITY_LABELS,
    help="Median compute time of the last 50 steps. A straggler has the highest value.",
    absent=LAST_VALUE_ABSENT,
    source="step - data_loading - grad_sync",
    details=(
        (
            "The compute time of a step is its duration minus the time in which the rank waited for data and"
            " for other ranks."
        ),
    ),
    lifetime=Lifetime.LAST_VALUE,
)
PHASE = TrainingFamily(
    name="training_phase_seconds_total",
    type="counter",
    unit="seconds",
    labels=(*IDENTITY_LABELS, "phase"),
    help="Time of the main thread by phase. Phases do not overlap; their sum is the wall time.",
    absent=TOTAL_ABSENT,
    source="exclusive time of spans",
)
PHASE_ENTRIES = TrainingFamily(
    name="training_phase_entries_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "phase"),
    help="Number of times that the phase started.",
    absent=TOTAL_ABSENT,
    source="spans",
)
PHASE_DURATION = TrainingFamily(
    name="training_phase_duration_seconds",
    type="histogram",
    unit="seconds",
    labels=(*RUN_LABELS, "phase"),
    help="Duration of recurring phases, excluding nested phases.",
    absent=RUN_TOTAL_ABSENT,
    source="exclusive time of one span",
)
SPAN_DURATION = TrainingFamily(
    name="training_span_duration_seconds",
    type="summary",
    unit="seconds",
    labels=(*IDENTITY_LABELS, "span"),
    help="Duration of spans that are not phases. Spans are nested: do not add their durations.",
    absent=TOTAL_ABSENT,
    source="exporter.span, timed_span, application, training_loop",
    details=("Such spans are the application, training loops, and spans named by the job.",),
)
PHASE_GPU = TrainingFamily(
    name="training_phase_gpu_seconds_total",
    type="counter",
    unit="seconds",
    labels=(*IDENTITY_LABELS, "phase"),
    help=(
        "Device time of the timed steps by phase, from the first to the last operation of the phase on the"
        " device."
    ),
    absent=TOTAL_ABSENT,
    source="CUDA events on the current stream of the main thread",
    details=("Steps are timed if the job uses CUDA through torch and steps take more than 5 ms.",),
)
GPU_TIMED_STEPS = TrainingFamily(
    name="training_gpu_timed_steps_total",
    type="counter",
    labels=IDENTITY_LABELS,
    help=(
        "Steps timed on the device, at most ten per second. Divide training_phase_gpu_seconds_total by this"
        " count."
    ),
    absent=TOTAL_ABSENT,
    source="see training_phase_gpu_seconds_total",
)
GPU_IDLE_BETWEEN_STEPS = TrainingFamily(
    name="training_gpu_idle_between_steps_seconds_total",
    type="counter",
    unit="seconds",
    labels=IDENTITY_LABELS,
    help="Idle device time between two timed steps, outside all phases or in data_loading.",
    absent=TOTAL_ABSENT,
    source="see training_phase_gpu_seconds_total",
    details=("The value is the delay that the data loader causes and that queued kernels do not hide.",),
)
STEP_GPU_DURATION = TrainingFamily(
    name="training_step_gpu_duration_seconds",
    type="histogram",
    unit="seconds",
    labels=RUN_LABELS,
    help="Device time of a timed step.",
    absent=RUN_TOTAL_ABSENT,
    source="see training_phase_gpu_seconds_total",
)
PHASE_ACTIVE = TrainingFamily(
    name="training_phase_active",
    type="gauge",
    labels=(*IDENTITY_LABELS, "phase"),
    help="1 for the current phase of the main thread, 0 for earlier phases.",
    absent=GAUGE_ABSENT,
    source="innermost open span of the main thread",
)
PHASE_ACTIVE_SINCE_TIMESTAMP = TrainingFamily(
    name="training_phase_active_since_timestamp_seconds",
    type="gauge",
    unit="seconds",
    labels=IDENTITY_LABELS,
    help="Unix time at which the current phase of the main thread started.",
    absent=GAUGE_ABSENT,
    source="start of the innermost open span",
)
COLLECTIVE_SEQUENCE = TrainingFamily(
    name="training_collective_sequence",
    type="gauge",
    labels=(*IDENTITY_LABELS, "group"),
    help=(
        "Sequence number of the latest collective operation of a process group. A rank with a lower number is"
        " behind."
    ),
    absent=GAUGE_ABSENT,
    source="torch.distributed process groups",
)
BACKGROUND = TrainingFamily(
    name="training_background_seconds_total",
    type="counter",
    unit="seconds",
    labels=(*RUN_LABELS, "task"),
    help="Duration of background work by task. The work is not part of any phase.",
    absent=RUN_TOTAL_ABSENT,
    source="training.background(...)",
    details=(
        ("Tasks are, for example, `checkpoint_upload`, `checkpoint_finalize`, `prefetch` and `eval_async`."),
    ),
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
    LAST_PROGRESS_TIMESTAMP,
    MODEL_FLOPS,
    HARDWARE_FLOPS,
    RANK_COMPUTE,
    PHASE,
    PHASE_ENTRIES,
    PHASE_DURATION,
    SPAN_DURATION,
    PHASE_GPU,
    GPU_TIMED_STEPS,
    GPU_IDLE_BETWEEN_STEPS,
    STEP_GPU_DURATION,
    PHASE_ACTIVE,
    PHASE_ACTIVE_SINCE_TIMESTAMP,
    COLLECTIVE_SEQUENCE,
    BACKGROUND,
)
