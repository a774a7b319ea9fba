"""Families of the training, of torchelastic and of the bridges, which the job's processes fill by Stats.

The names are reserved: a Stat with one of them is admitted when it is just that family. Of a family that is the run's, what
rank 0's process says is published. Those of torchelastic are the agent's (`role="agent"`, no rank), but for
`training_elastic_refused_total`.
"""

from __future__ import annotations

from dataclasses import replace

from exporter.families import FamilySpec, rows
from exporter.ledger.families import IDENTITY_LABELS

_TELLS = "; absent where the job does not tell, "
_TOTAL = _TELLS + "when its totals no longer linger, and while the ledger's state cannot be written."
_GAUGE = _TELLS + "when the process is gone or its feed is not refreshed."
_LAST = _GAUGE[:-1] + ", and while no step ends (goodput.hang_after)."

LAST_VALUES: set[str] = set()
"""Families of last values, which go when no step ends."""


def _table(text: str) -> tuple[FamilySpec, ...]:
    found = []
    for spec, words in rows(text).items():
        whose = IDENTITY_LABELS[:1] if "run's" in words else IDENTITY_LABELS
        absent = _LAST if "last value" in words else _GAUGE if spec.type == "gauge" else _TOTAL
        if "last value" in words:
            LAST_VALUES.add(spec.name)
        told = spec.help + absent + (" Rank 0's." if "run's" in words else "")
        found.append(replace(spec, help=told, labels=whose + spec.labels))
    return tuple(found)


TRAINING = _table("""
training_steps_total{mode}: Steps that were executed, repeated ones included: optimizer steps (train),
    batches (validation, test) <- ends of training_iteration, validation_iteration and testing_iteration
training_samples_total{mode}: Samples of this rank's own share, so that the sum over ranks is the run's <-
    training.record(samples=...), else the configured batch size
training_tokens_total{mode}: Tokens of this rank's own share, so that the sum over ranks is the run's <-
    training.record(tokens=...), else samples * sequence length
training_microbatches_total: Micro-batches, of which several make a step under gradient accumulation <-
    training.record(microbatches=...)
training_epochs_total: Epochs that have ended <- training.record(epoch=...)
training_step [run's]: Steps completed as the job counts them, those before this process included; goes
    back after a restart <- train_iterations_start + completed iterations
training_step_target [run's]: Step at which the training is to end <- train_iterations_target,
    training.describe(step_target=...)
training_epoch [run's]: Epoch that is under way <- training.record(epoch=...)
training_step_duration_seconds{mode} [run's histogram]: Duration of steps <- begin to end of an iteration
training_step_longest_seconds [run's last value]: Longest of the last 100 steps without the first <-
    training_step_duration_seconds
training_step_ideal_seconds [run's last value]: Mean of those of the last 200 steps that are no slower
    than median + 3 * median absolute deviation <- training_step_duration_seconds
training_slow_step_excess_seconds_total: Time by which slow steps (above median + 3 * median absolute
    deviation) were longer than an ideal one <- sum of duration - ideal over slow steps
training_last_progress_timestamp_seconds: Unix time at which the latest step or validation batch ended,
    from the first one to the end of the training loop <- end of an iteration
training_model_flops_total: Floating-point operations that the model needs for what was trained, forward
    and backward <- flops_per_token * tokens or flops_per_sample * samples
training_hardware_flops_total: Floating-point operations that were executed for it, with what is computed
    again <- hardware_flops_per_token * tokens
training_rank_compute_seconds [last value]: Median over the last 50 steps of the time without waiting for
    data and for other ranks: what a straggler is measured by <- step - data_loading - grad_sync
training_phase_seconds_total{phase}: Time of the main thread by what it did; each moment counts for one
    phase, so that they sum to wall time <- exclusive time of spans
training_phase_entries_total{phase}: Times that a phase began <- spans
training_phase_duration_seconds{phase} [run's histogram]: Duration of phases that recur, without what was
    done within them <- exclusive time of one span
training_span_duration_seconds{span} [summary]: Duration of spans that are no phase: the application,
    training loops, and those of the job's own names <- exporter.span, timed_span, application, training_loop
training_phase_gpu_seconds_total{phase}: Time of the device in each phase, of the steps that are timed: from
    when it reaches the phase's begin to when it reaches its end, whatever the host queues meanwhile. Where
    the job uses CUDA through torch and steps take more than 5 ms <- CUDA events on the current stream of the
    main thread
training_gpu_timed_steps_total: Steps that were timed on the device: every one up to ten a second, then
    some; what to divide training_phase_gpu_seconds_total by <- see training_phase_gpu_seconds_total
training_gpu_idle_between_steps_seconds_total: Time of the device between the work of one timed step and the
    next, in no phase or that of loading data: what the data loader costs, after all that the queue of
    kernels hides <- see training_phase_gpu_seconds_total
training_step_gpu_duration_seconds [run's histogram]: Time of the device from the begin of a timed step to
    its end <- see training_phase_gpu_seconds_total
training_phase_active{phase}: 1 for the phase in which the main thread is, 0 for those in which it was <-
    innermost open span of the main thread
training_phase_active_since_timestamp_seconds: Unix time since which the main thread is in its phase <-
    begin of the innermost open span
training_background_seconds_total{task} [run's]: Time of work beside the training, such as
    checkpoint_upload, checkpoint_finalize, prefetch, eval_async; in no phase <- training.background(...)
training_loss{mode} [run's last value]: Last finite loss <- training.record(loss=...)
training_grad_norm [run's last value]: Last finite norm of the gradient <- training.record(grad_norm=...)
training_learning_rate [run's last value]: Learning rate <- training.record(learning_rate=...)
training_loss_scale [run's last value]: Scale of the loss under mixed precision <-
    training.record(loss_scale=...)
training_nonfinite_total{kind,value} [run's]: Losses and gradient norms (kind: loss, grad) that were no
    finite number (value: nan, inf) <- training.record(loss=..., grad_norm=...)
training_skipped_steps_total{reason} [run's]: Steps without an update of the model (reason: overflow,
    nonfinite) <- training.skipped_step(...)
training_misuse_total{call,rule}: Calls of exporter.training that could not be meant so, by function and
    by the rule that they broke; each was logged, and what it would have changed is as before <-
    exporter.training
training_checkpoints_total{kind,result} [run's]: Saves by kind (sync, async, local) and result (ok,
    failed) <- checkpoint_save, on_save_checkpoint_*
training_checkpoint_duration_seconds{kind,part} [run's histogram]: Duration of saves: of what held up the
    training (part: blocking), and until the save was safe (total) <- checkpoint_save,
    on_save_checkpoint_*
training_checkpoint_last_success_timestamp_seconds [run's]: Unix time of the latest successful save <-
    on_save_checkpoint_success
training_checkpoint_last_step [run's]: Step of the latest successful save <- on_save_checkpoint_success
training_checkpoint_last_bytes [run's]: Size of the latest successful save <-
    training.checkpoint_saved(bytes=...)
training_checkpoint_interval_seconds [run's]: Median time between the last 5 successful saves <-
    on_save_checkpoint_success
training_gpu_memory_bytes{gpu,state,uuid}: Memory of the GPU as torch's allocator sees it (state:
    allocated, reserved, peak_allocated, peak_reserved; peaks since the job last reset them; uuid is
    unknown before torch 2.4) <- torch.cuda.memory_stats
training_gpu_alloc_retries_total{gpu,uuid}: Allocations that succeeded only after torch had emptied its
    cache <- torch.cuda.memory_stats: num_alloc_retries
training_gpu_oom_total{gpu,uuid}: Allocations that failed for want of memory <- torch.cuda.memory_stats:
    num_ooms
""")

ELASTIC = _table("""
training_elastic_function_calls_total{function,outcome}: Calls of the torchelastic agent's own functions
    that have returned (success) or raised (failure) <- torchelastic metrics
    <class>.<function>.{success,failure}
training_elastic_function_seconds{function} [summary]: How long calls of the agent's own functions took,
    in whole milliseconds <- torchelastic metrics <class>.<function>.duration.ms
training_elastic_rendezvous_seconds [histogram]: How long the agent waited for the others at each
    rendezvous <- torchelastic metric SimpleElasticAgent._rendezvous.duration.ms
training_elastic_restarts_total: Restarts of this agent's workers, whoever caused them: a failure here, or
    nodes that failed, came or went <- torchelastic metric SimpleElasticAgent._restart_workers.success
training_elastic_failure_restarts_total{worker_role}: Restarts that a failure of this agent's own workers
    has used up <- falls of the torchelastic metric workers.<role>.remaining_restarts
training_elastic_remaining_restarts{worker_role}: Restarts that failures may still use up <- torchelastic
    metric workers.<role>.remaining_restarts
training_elastic_worker_state_checks_total{state,worker_role}: Looks of the agent at its workers, by what
    it found (healthy, succeeded, failed, unhealthy, ...); the time in a state is the increase times the
    agent's monitor interval <- torchelastic metrics workers.<role>.<state>
training_elastic_flakiness_ratio{worker_role} [summary]: Share of the allowed restarts that a run has used
    up, or 1 when it failed: sum / count <- torchelastic metric workers.<role>.flakiness
training_elastic_runs_total{outcome,worker_role}: Runs of the agent that have ended, by what became of the
    workers: success_no_retries, success_with_retries, failed_no_retries, failed_with_retries, or
    interrupted (a signal or an error of the agent); what the agent calls its own success says only that
    it returned <- torchelastic metrics workers.<role>.run_*, SimpleElasticAgent.run.failure
training_elastic_worker_starts_total{worker_role}: Worker processes that the agent has started <-
    torchelastic event torchelastic.worker.status.START
training_elastic_worker_results_total{exit_code,result,worker_role}: Final results of workers (succeeded,
    failed, terminated) with their exit codes; a failure that leads to a restart is none. Of several that
    failed, those with exit code -15 or -9 were mostly ended by the agent <- torchelastic events
    torchelastic.worker.status.{SUCCEEDED,FAILED,TERMINATED} of workers
training_elastic_refused_total{reason}: Values of torchelastic metrics that were not recorded: the
    family is that of another pair of group and name, or somebody else's (collision), too many names
    (too_many), no usable name (name), and metrics that a handler missed since it raised (handler)
    <- exporter.elastic
""")

BRIDGES = _table("""
training_torch_monitor_overflows_total: Looks that found the bridge's queue of torch.monitor events full,
    so that an unknown number of them was lost <- exporter.bridges.monitor
training_torch_monitor_refused_total: Numbers of torch.monitor Stats that were not recorded (a name that
    cannot be used or is somebody else's, too many names, no number), and events of a class that cannot be
    read <- exporter.bridges.monitor
""")

SPAN_EXPORTERS = _table("""
training_span_exporter_records_total{exporter}: Records (starts, stops, events and errors of spans) that
    an exporter of the job has taken <- exporter of spans; `exporter` is the class, with -2 and so on for
    more of the same
training_span_exporter_dropped_total{exporter,reason}: Records that an exporter of the job missed: its
    queue was full (queue_full), it raised every time it was asked (failed), or the process ended first
    (exit) <- exporter of spans
training_span_exporter_errors_total{exporter}: Calls of an exporter of the job that raised; each is tried
    again, so most cost no record <- exporter of spans
""")

SPECS = (*TRAINING, *ELASTIC, *BRIDGES, *SPAN_EXPORTERS)
