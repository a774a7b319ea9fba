"""Families of torchelastic's metrics, filled by Stats of torchrun's agent.

The agent has no rank and the label `role="agent"`. Other processes may report `training_elastic_refused_total`.
"""

from __future__ import annotations

from exporter.ledger.families import IDENTITY_LABELS
from exporter.ledger.families.training_family import GAUGE_ABSENT, TOTAL_ABSENT, TrainingFamily

FUNCTION_CALLS = TrainingFamily(
    name="training_elastic_function_calls_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "function", "outcome"),
    help="Calls of the torchelastic agent's functions by outcome: returned (success) or raised (failure).",
    absent=TOTAL_ABSENT,
    source="torchelastic metrics <class>.<function>.{success,failure}",
)
FUNCTION = TrainingFamily(
    name="training_elastic_function_seconds",
    type="summary",
    unit="seconds",
    labels=(*IDENTITY_LABELS, "function"),
    help=(
        "Duration of calls of the agent's functions, with a resolution of 1 ms. Calls are nested: do not add"
        " their durations."
    ),
    absent=TOTAL_ABSENT,
    source="torchelastic metrics <class>.<function>.duration.ms",
)
RENDEZVOUS = TrainingFamily(
    name="training_elastic_rendezvous_seconds",
    type="histogram",
    unit="seconds",
    labels=IDENTITY_LABELS,
    help="Waiting time of the agent at each rendezvous.",
    absent=TOTAL_ABSENT,
    source="torchelastic metric SimpleElasticAgent._rendezvous.duration.ms",
)
RESTARTS = TrainingFamily(
    name="training_elastic_restarts_total",
    type="counter",
    labels=IDENTITY_LABELS,
    help="Restarts of this agent's workers for any reason.",
    absent=TOTAL_ABSENT,
    source="torchelastic metric SimpleElasticAgent._restart_workers.success",
    details=("Reasons are a failure of a worker, or a node that failed, joined or left.",),
)
FAILURE_RESTARTS = TrainingFamily(
    name="training_elastic_failure_restarts_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "worker_role"),
    help="Restarts after a failure of this agent's workers, by role of the workers (worker_role).",
    absent=TOTAL_ABSENT,
    source="decreases of the torchelastic metric workers.<role>.remaining_restarts",
)
REMAINING_RESTARTS = TrainingFamily(
    name="training_elastic_remaining_restarts",
    type="gauge",
    labels=(*IDENTITY_LABELS, "worker_role"),
    help="Remaining restarts after failures, by role of the workers (worker_role).",
    absent=GAUGE_ABSENT,
    source="torchelastic metric workers.<role>.remaining_restarts",
)
WORKER_STATE_CHECKS = TrainingFamily(
    name="training_elastic_worker_state_checks_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "state", "worker_role"),
    help="Checks of the workers by the agent, by role of the workers (worker_role) and state.",
    absent=TOTAL_ABSENT,
    source="torchelastic metrics workers.<role>.<state>",
    details=(
        "States are, for example, `healthy`, `succeeded`, `failed` and `unhealthy`.",
        "The time in a state is the increase times the agent's monitor interval.",
    ),
)
FLAKINESS = TrainingFamily(
    name="training_elastic_flakiness",
    type="summary",
    labels=(*IDENTITY_LABELS, "worker_role"),
    help="Share of the allowed restarts that the workers of a role (worker_role) used; 1 for a failed run.",
    absent=TOTAL_ABSENT,
    source="torchelastic metric workers.<role>.flakiness",
    details=("The mean is sum / count.",),
)
RUNS = TrainingFamily(
    name="training_elastic_runs_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "outcome", "worker_role"),
    help="Finished runs of the agent, by role of the workers (worker_role) and outcome.",
    absent=TOTAL_ABSENT,
    source="torchelastic metrics workers.<role>.run_*, SimpleElasticAgent.run.failure",
    details=(
        (
            "Outcomes: `success_no_retries`, `success_with_retries`, `failed_no_retries`,"
            " `failed_with_retries`."
        ),
        "`interrupted`: a signal or an error of the agent ended the run.",
    ),
)
WORKER_STARTS = TrainingFamily(
    name="training_elastic_worker_starts_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "worker_role"),
    help="Worker processes started by the agent, by role of the workers (worker_role).",
    absent=TOTAL_ABSENT,
    source="torchelastic event torchelastic.worker.status.START",
)
WORKER_RESULTS = TrainingFamily(
    name="training_elastic_worker_results_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "exit_code", "result", "worker_role"),
    help="Final results of workers, by result (succeeded, failed, terminated), exit_code and worker_role.",
    absent=TOTAL_ABSENT,
    source="torchelastic events torchelastic.worker.status.{SUCCEEDED,FAILED,TERMINATED} of workers",
    details=(
        "A failure before a restart is not final.",
        (
            "After a failure of a worker, the agent terminates the other workers. Their exit code is -15 or"
            " -9."
        ),
    ),
)
REFUSED = TrainingFamily(
    name="training_elastic_refused_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "reason"),
    help="Refused values of torchelastic metrics, by reason.",
    absent=TOTAL_ABSENT,
    source="exporter.elastic",
    details=(
        "`collision`: the family belongs to the exporter or to another Stat.",
        "`too_many`: too many names.",
        "`name`: invalid name.",
        "`handler`: a handler raised.",
    ),
)

SPECS = (
    FUNCTION_CALLS,
    FUNCTION,
    RENDEZVOUS,
    RESTARTS,
    FAILURE_RESTARTS,
    REMAINING_RESTARTS,
    WORKER_STATE_CHECKS,
    FLAKINESS,
    RUNS,
    WORKER_STARTS,
    WORKER_RESULTS,
    REFUSED,
)
