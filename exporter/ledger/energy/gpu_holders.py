"""Runs and phases of the processes that hold GPUs, from the feed and the process collector."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf

from exporter.collectors.job import JobProcess, MachineUse, ProcessLife
from exporter.ledger.energy.gpu_attribution import GpuSlice, ReportedProcess
from exporter.ledger.energy.work import PhaseInterval, WorkSnapshot

STARTUP_PHASE = "init"
"""Phase of a process before the first reported phase."""

MAX_PHASE_WAIT_SECONDS = 20.0
"""Maximum delay of the attribution of energy while the phases of a running process are outstanding."""
LAST_SNAPSHOT_SECONDS = 5.0
"""Maximum delay of the attribution of energy while the last snapshot of an exited process is outstanding."""
STALE_FEED_SECONDS = 10.0
"""Time after the exit during which the feed may still show a process without a pid as running."""
FEED_ONLY_RETENTION_SECONDS = 60.0
"""Time after the exit during which a process that only the feed reports can receive energy."""
BINDING_SECONDS = 180.0
"""Time after the exit during which a process of the feed is bound to its pid again in each pass.

Longer than `UNKNOWN_RUN_SECONDS`, so that the run of a pid is known as long as the energy of the pid is stored."""
START_TOLERANCE_SECONDS = 1.0
"""Tolerance between the clocks of two start times of a process."""
MAX_PIDS = 4096
"""Maximum number of pids with a known run. Further pids replace the oldest."""
_MIN_PREFIX_LENGTH = 5  # of a UUID: "GPU-" and a digit


class GpuHolders:
    """Runs and phases of processes by pid, including exited processes.

    A process of the feed that is invisible in the sidecar's pid namespace has a negative number instead of a pid.
    """

    def __init__(self) -> None:
        self.running_pids: set[int] = set()  # pids of the running processes of the feed
        self.lives: dict[int, ProcessLife] = {}  # by pid or negative number
        self._run_by_pid: dict[int, str] = {}  # by pid or negative number
        # monotonic times at which the processes with a run were last known to exist; by pid or negative number
        self._known_at_by_pid: dict[int, float] = {}
        self._process_id_by_pid: dict[int, str] = {}  # ids of the feed's processes; by pid or negative number
        self._pid_by_process_id: dict[str, int] = {}  # pids or negative numbers
        self._intervals_by_process_id: dict[str, tuple[PhaseInterval, ...]] = {}
        self._process_ids_by_run: dict[str, list[str]] = {}
        self._last_number = 0
        # True if the last running process of the feed had a pid in the sidecar's pid namespace
        self._sees_pids = True

    def update(
        self,
        job_processes: Sequence[JobProcess],
        machine_use: MachineUse | None,
        work: WorkSnapshot,
        lives: Mapping[int, ProcessLife],
        *,
        wall: float,
        now: float,
    ) -> None:
        """Update from the feed, the process collector and the phases; *wall* is Unix time, *now* is monotonic."""
        self.running_pids = running_pids(job_processes)
        self.lives = dict(lives)
        process_ids = {job_process.identity.id for job_process in job_processes}
        self._pid_by_process_id = {
            process_id: pid
            for process_id, pid in self._pid_by_process_id.items()
            if process_id in process_ids
        }
        for job_process in job_processes:
            if job_process.is_alive or (
                job_process.ended_at is not None and job_process.ended_at > wall - BINDING_SECONDS
            ):
                self._bind(job_process, wall - now, now)
        if machine_use is not None:
            for run_use in machine_use.runs:
                for pid in run_use.pids:
                    self._set_run(pid, run_use.run, machine_use.time)
        for pid, life in lives.items():
            if life.started_at > self._known_at_by_pid.get(pid, inf) + START_TOLERANCE_SECONDS:
                self._discard_run(pid)  # a later process has the pid of an ended process
        self._intervals_by_process_id = {
            process_work.process_id: process_work.intervals
            for process_work in work.processes
            if process_work.intervals
        }
        self._process_ids_by_run = {}
        for process_work in work.processes:
            self._process_ids_by_run.setdefault(process_work.run, []).append(process_work.process_id)

    def _bind(self, process: JobProcess, wall_clock_offset: float, now: float) -> None:
        """Assign a pid or a negative number to a process of the feed, and store the lifetime of a negative number.

        The first of these that exists is assigned:

        1. the pid that the sidecar sees;
        2. for an exited process, the pid that the process reported, if a process with this pid lived when the recording started;
        3. the pid or number of the previous pass;
        4. a new negative number.
        """
        identity = process.identity
        start = identity.started - wall_clock_offset
        exited_at = None if process.ended_at is None else max(start, process.ended_at - wall_clock_offset)
        pid = process.pid
        if pid is None:
            life = self.lives.get(identity.pid)
            if not process.is_alive and life is not None and _is_within(start, life):
                pid = identity.pid  # the feed file was first read after the exit
        elif process.is_alive:
            self._sees_pids = True
        if pid is None:
            pid = self._pid_by_process_id.get(identity.id)
            if process.is_alive:
                self._sees_pids = False
        if pid is None:
            self._last_number -= 1
            pid = self._last_number
        self._pid_by_process_id[identity.id] = pid
        self._set_run(pid, identity.run, now if exited_at is None else exited_at)
        self._process_id_by_pid[pid] = identity.id
        if pid < 0:
            self.lives[pid] = ProcessLife(pid, start, exited_at)

    def reported_processes(
        self, job_processes: Sequence[JobProcess], uuids: Mapping[int, str], *, now: float
    ) -> dict[str, list[ReportedProcess]]:
        """Return the processes that use each GPU according to the feed, by UUID.

        Args:
            job_processes: Processes of the feed.
            uuids: UUIDs of the GPUs by NVML index.
            now: Monotonic time.
        """
        processes_by_uuid: dict[str, list[ReportedProcess]] = {}
        for job_process in job_processes:
            pid = self._pid_by_process_id.get(job_process.identity.id)
            life = None if pid is None else self.lives.get(pid)
            has_used_cuda = job_process.gpus.used  # None if unknown
            is_rank = job_process.identity.rank is not None
            if life is None or has_used_cuda is False or not (is_rank or has_used_cuda):
                continue
            if life.ended_at is not None and life.ended_at < now - FEED_ONLY_RETENTION_SECONDS:
                continue
            for uuid in filter(None, (_uuid_of(name, uuids) for name in job_process.gpus.names)):
                process = ReportedProcess(
                    life,
                    has_used_cuda=bool(has_used_cuda),
                    has_gpu_name=job_process.gpus.named,
                    is_listable=self._sees_pids and (life.pid > 0 or life.ended_at is not None),
                )
                processes_by_uuid.setdefault(uuid, []).append(process)
        return processes_by_uuid

    def find_run(self, pid: int) -> str:
        """Return the run of a pid, or an empty text if unknown."""
        return self._run_by_pid.get(pid, "")

    def reports_training(self, run: str) -> bool:
        """Return True if a process of the run reports training."""
        return run in self._process_ids_by_run

    def phases_until(self, pids: Collection[int], *, now: float) -> float:
        """Return the monotonic time up to which energy can be split among the phases of the processes; infinity without a limit.

        Later phases may still arrive in a snapshot: of a running process for `MAX_PHASE_WAIT_SECONDS`, of an exited process for
        `LAST_SNAPSHOT_SECONDS` after the exit. A process without phases sets no limit, except that the exit of a process without a
        pid is noticed up to `STALE_FEED_SECONDS` late.
        """
        limit = inf
        for pid in pids:
            intervals = self._intervals_by_process_id.get(self._process_id_by_pid.get(pid, ""), ())
            life = self.lives.get(pid)
            exited_at = None if life is None else life.ended_at
            if not intervals:
                if pid < 0 and exited_at is None:
                    limit = min(limit, now - STALE_FEED_SECONDS)
                continue
            if exited_at is None:
                limit = min(limit, max(intervals[-1].end, now - MAX_PHASE_WAIT_SECONDS))
            elif now - exited_at < LAST_SNAPSHOT_SECONDS:
                limit = min(limit, intervals[-1].end)
        return limit

    def intervals(self, gpu_slice: GpuSlice) -> list[tuple[PhaseInterval, ...]]:
        """Return the phase intervals of the processes of a slice.

        The last phase is extended to the end of the slice. The time before the first reported phase is `STARTUP_PHASE`, if the
        process had started at the start of the slice.
        """
        intervals_by_process = []
        for pid in gpu_slice.pids:
            reported_intervals = self._intervals_by_process_id.get(
                self._find_process_id(pid, gpu_slice.run), ()
            )
            if not reported_intervals:
                continue
            life = self.lives.get(pid)
            intervals = list(reported_intervals)
            if (
                life is not None
                and reported_intervals[0].start > gpu_slice.start >= life.started_at - START_TOLERANCE_SECONDS
            ):
                intervals.insert(
                    0, PhaseInterval(gpu_slice.start, reported_intervals[0].start, STARTUP_PHASE)
                )
            if reported_intervals[-1].end < gpu_slice.end:
                intervals.append(
                    PhaseInterval(reported_intervals[-1].end, gpu_slice.end, reported_intervals[-1].phase)
                )
            intervals_by_process.append(tuple(intervals))
        return intervals_by_process

    def _find_process_id(self, pid: int, run: str) -> str:
        """Return the id of the feed's process for a pid.

        For a pid that the feed does not report, return the id of the run's only process. Returns "" if the run has no process or several.
        """
        process_id = self._process_id_by_pid.get(pid)
        if process_id is not None:
            return process_id
        process_ids = self._process_ids_by_run.get(run, ())
        return process_ids[0] if len(process_ids) == 1 else ""

    def _set_run(self, pid: int, run: str, known_at: float) -> None:
        """Set the run of the process that had a pid at a monotonic time."""
        self._run_by_pid.pop(pid, None)  # inserted again as the newest entry
        self._run_by_pid[pid] = run
        self._known_at_by_pid[pid] = known_at
        while len(self._run_by_pid) > MAX_PIDS:
            self._discard_run(next(iter(self._run_by_pid)))

    def _discard_run(self, pid: int) -> None:
        """Discard the run and the feed's process of a pid."""
        del self._run_by_pid[pid], self._known_at_by_pid[pid]
        self._process_id_by_pid.pop(pid, None)


def running_pids(job_processes: Sequence[JobProcess]) -> set[int]:
    """Return the pids of the running processes of the feed."""
    return {process.pid for process in job_processes if process.is_alive and process.pid is not None}


def _is_within(start: float, life: ProcessLife) -> bool:
    """Return True if a recording that started at *start* can belong to a process with the lifetime *life*."""
    return start >= life.started_at - START_TOLERANCE_SECONDS and (
        life.ended_at is None or start <= life.ended_at
    )


def _uuid_of(name: str, uuids: Mapping[int, str]) -> str:
    """Return the UUID of a GPU by NVML index or by a prefix of the UUID.

    Returns "" for an unknown GPU, a MIG instance, and a prefix that is ambiguous or too short.
    """
    if name.isdecimal():
        return uuids.get(int(name), "")
    matches = [uuid for uuid in uuids.values() if len(name) >= _MIN_PREFIX_LENGTH and uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else ""
