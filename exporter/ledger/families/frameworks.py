"""Families of torchelastic and of the bridges, filled by Stats as those of the training are.

Runs in the sidecar. All but `training_elastic_refused_total` of the first are the agent's: `role="agent"`, no rank.
"""

from __future__ import annotations

from exporter.ledger.families.training import of_rank

ELASTIC = (
    of_rank(
        "training_elastic_function_calls_total",
        "counter",
        "Calls of the torchelastic agent's own functions that have returned (success) or raised (failure)",
        "function",
        "outcome",
        source="torchelastic metrics <class>.<function>.{success,failure}",
    ),
    of_rank(
        "training_elastic_function_seconds",
        "summary",
        "How long calls of the agent's own functions took, in whole milliseconds",
        "function",
        source="torchelastic metrics <class>.<function>.duration.ms",
    ),
    of_rank(
        "training_elastic_rendezvous_seconds",
        "histogram",
        "How long the agent waited for the others at each rendezvous",
        source="torchelastic metric SimpleElasticAgent._rendezvous.duration.ms",
    ),
    of_rank(
        "training_elastic_restarts_total",
        "counter",
        "Restarts of this agent's workers, whoever caused them: a failure here, or nodes that failed, came or went",
        source="torchelastic metric SimpleElasticAgent._restart_workers.success",
    ),
    of_rank(
        "training_elastic_failure_restarts_total",
        "counter",
        "Restarts that a failure of this agent's own workers has used up",
        "worker_role",
        source="falls of the torchelastic metric workers.<role>.remaining_restarts",
    ),
    of_rank(
        "training_elastic_remaining_restarts",
        "gauge",
        "Restarts that failures may still use up",
        "worker_role",
        source="torchelastic metric workers.<role>.remaining_restarts",
    ),
    of_rank(
        "training_elastic_worker_state_checks_total",
        "counter",
        "Looks of the agent at its workers, by what it found (healthy, succeeded, failed, unhealthy, ...); the time in"
        " a state is the increase times the agent's monitor interval",
        "state",
        "worker_role",
        source="torchelastic metrics workers.<role>.<state>",
    ),
    of_rank(
        "training_elastic_flakiness_ratio",
        "summary",
        "Share of the allowed restarts that a run has used up, or 1 when it failed: sum / count",
        "worker_role",
        source="torchelastic metric workers.<role>.flakiness",
    ),
    of_rank(
        "training_elastic_runs_total",
        "counter",
        "Runs of the agent that have ended, by what became of the workers: success_no_retries, success_with_retries,"
        " failed_no_retries, failed_with_retries, or interrupted (a signal or an error of the agent); what the agent"
        " calls its own success says only that it returned",
        "outcome",
        "worker_role",
        source="torchelastic metrics workers.<role>.run_*, SimpleElasticAgent.run.failure",
    ),
    of_rank(
        "training_elastic_worker_starts_total",
        "counter",
        "Worker processes that the agent has started",
        "worker_role",
        source="torchelastic event torchelastic.worker.status.START",
    ),
    of_rank(
        "training_elastic_worker_results_total",
        "counter",
        "Final results of workers (succeeded, failed, terminated) with their exit codes; a failure that leads to a"
        " restart is none. Of several that failed, those with exit code -15 or -9 were mostly ended by the agent",
        "exit_code",
        "result",
        "worker_role",
        source="torchelastic events torchelastic.worker.status.{SUCCEEDED,FAILED,TERMINATED} of workers",
    ),
    of_rank(
        "training_elastic_refused_total",
        "counter",
        "Values of torchelastic metrics that were not recorded: another pair of group and name has the same family"
        " (collision), too many names (too_many), no usable name (name), a family that is somebody else's"
        " (definition), and metrics that a handler missed since it raised (handler)",
        "reason",
        source="exporter.elastic",
    ),
)

BRIDGES = (
    of_rank(
        "training_torch_wait_calls_total",
        "counter",
        "Waits of torch's stores, process groups and compiler that have begun",
        "key",
        source="wait_counter_values of torch's control plane: total_calls",
    ),
    of_rank(
        "training_torch_wait_seconds_total",
        "counter",
        "Time of the waits of torch's stores, process groups and compiler that have ended",
        "key",
        source="wait_counter_values: total_time_us",
    ),
    of_rank(
        "training_torch_waits",
        "gauge",
        "Waits of torch's stores, process groups and compiler that are under way",
        "key",
        source="wait_counter_values: active_count",
    ),
    of_rank(
        "training_torch_wait_longest_seconds",
        "gauge",
        "The longest wait of torch's stores, process groups and compiler in this process so far",
        "key",
        source="wait_counter_values: max_time_us",
    ),
    of_rank(
        "training_torch_monitor_overflows_total",
        "counter",
        "Looks that found the bridge's queue of torch.monitor events full, so that an unknown number of them was lost",
        source="exporter.bridges.torch_monitor",
    ),
    of_rank(
        "training_torch_monitor_refused_total",
        "counter",
        "Numbers of torch.monitor Stats that were not recorded (a name that cannot be used or is somebody else's, too"
        " many names, no number), and events of a class that cannot be read",
        source="exporter.bridges.torch_monitor",
    ),
)

SPAN_EXPORTERS = (
    of_rank(
        "training_span_exporter_records_total",
        "counter",
        "Records (starts, stops, events and errors of spans) that an exporter of the job has taken",
        "exporter",
        source="exporter of spans; `exporter` is the class, with -2 and so on for more of the same",
    ),
    of_rank(
        "training_span_exporter_dropped_total",
        "counter",
        "Records that an exporter of the job missed: its queue was full (queue_full), it raised every time it was asked"
        " (failed), or the process ended first (exit)",
        "exporter",
        "reason",
        source="exporter of spans",
    ),
    of_rank(
        "training_span_exporter_errors_total",
        "counter",
        "Calls of an exporter of the job that raised; each is tried again, so most cost no record",
        "exporter",
        source="exporter of spans",
    ),
)

SPECS = (*ELASTIC, *BRIDGES, *SPAN_EXPORTERS)
