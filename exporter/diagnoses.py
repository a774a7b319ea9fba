"""Diagnoses: one table of known problems, shared by `check`, `run`, the status page and the log.

A row has the condition under which it applies, the sentence that describes it, and the remedy; `{…}` are facts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Statement:
    """Sentence and remedy of a diagnosis, with the facts filled in."""

    sentence: str
    remedy: str

    def __str__(self) -> str:
        """Return sentence and remedy on one line."""
        return f"{self.sentence}; remedy: {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Known problem: condition, sentence and remedy, with placeholders for facts."""

    condition: str
    sentence: str
    remedy: str

    def describe(self, **facts: object) -> Statement:
        """Return sentence and remedy with the facts filled in."""
        return Statement(self.sentence.format(**facts), self.remedy.format(**facts))


# A job records nothing ----------------------------------------------------------------------------------

DISABLED = Diagnosis(
    condition="EXPORTER_DISABLED=1 in the job's environment",
    sentence="EXPORTER_DISABLED=1 is set for {python}",
    remedy="unset EXPORTER_DISABLED for the job",
)
AUTO_DISABLED = Diagnosis(
    condition="EXPORTER_AUTO=0, and the code calls nothing",
    sentence="EXPORTER_AUTO=0 is set for {python}, and the code records nothing",
    remedy="unset EXPORTER_AUTO for the job",
)
OTHER_ENVIRONMENT = Diagnosis(
    condition="the job's process has another EXPORTER_FEED_DIR than `run`",
    sentence="{python} was started without the environment of `run`",
    remedy="pass EXPORTER_AUTO=1 and EXPORTER_FEED_DIR={directory} on to the job",
)
NOT_INSTALLED = Diagnosis(
    condition="the job's interpreter does not find the package",
    sentence="training-exporter is not installed for {python}{error}",
    remedy="{install}",
)
SHADOWED = Diagnosis(
    condition="another module is called `exporter`",
    sentence="{python} imports {path} as `exporter`, instead of training-exporter",
    remedy="rename this file or folder",
)
NOTHING_RECORDED = Diagnosis(
    condition="the package is installed and the job calls nothing that is recorded",
    sentence="{python} has training-exporter, but the job has not used an optimizer, a loader, a Stat or a training call yet",
    remedy="{calls}",
)

# Feed directory -----------------------------------------------------------------------------------------

FEED_DIRECTORY_UNREADABLE = Diagnosis(
    condition="stat or statvfs of the feed directory fails",
    sentence="{directory}: {error}",
    remedy="choose another directory with --feed.dir",
)
FEED_DIRECTORY_FULL = Diagnosis(
    condition="no free space in the feed directory",
    sentence="{directory} is full",
    remedy="free some space, or choose another directory with --feed.dir",
)
FEED_DIRECTORY_NOT_WRITABLE = Diagnosis(
    condition="the job's user cannot create files in the feed directory",
    sentence="{directory} is not writable for the job's user",
    remedy="grant the user write access, or choose another directory with --feed.dir",
)
FEED_DIRECTORY_OPEN = Diagnosis(
    condition="another user's feed directory, writable for all users, without the sticky bit",
    sentence="{directory} belongs to uid {uid} and has mode {mode}: any user can remove or replace files of the jobs",
    remedy="chmod 1777 {directory}, or choose another directory with --feed.dir",
)
FOREIGN_ENTRY = Diagnosis(
    condition="an entry of another user in a shared directory, with a name of the exporter, such as owner.lock",
    sentence="{path} belongs to uid {uid}: this exporter ignores it, and uses {used}",
    remedy="remove {path}, and restart the exporter",
)
FOREIGN_ENTRY_SHOWN = Diagnosis(
    condition="exporter_feed_foreign_entry is 1",
    sentence="{entry} in the feed or state directory belongs to another user, and is ignored",
    remedy="remove it, and restart the exporter",
)
FEED_DIRECTORY_REMOTE = Diagnosis(
    condition="the feed directory is on a network file system",
    sentence="{directory} is on {filesystem}, whose locks are not reliable",
    remedy="use a memory-backed directory of the node, such as /dev/shm",
)

NO_FEED = Diagnosis(
    condition="no feed file for a minute after the start",
    sentence="no job has written to the feed directory {directory} yet",
    remedy="check that the job's Python has training-exporter installed, that the job records anything, and that the job has the"
    " same EXPORTER_FEED_DIR (or user) as this sidecar; `training-exporter check` checks each",
)

# Sidecar ------------------------------------------------------------------------------------------------

NO_SIDECAR = Diagnosis(
    condition="no process holds owner.lock",
    sentence="no exporter serves the feed directory",
    remedy="start one: training-exporter, or run the job with: training-exporter run COMMAND",
)
SECOND_SIDECAR = Diagnosis(
    condition="exporter_feed_owner is 0",
    sentence="the exporter at {base} does not own its feed directory: process {owner} does, and keeps the totals",
    remedy="stop one of the two exporters, or start it with a different --feed.dir",
)
NOT_READY = Diagnosis(
    condition="/-/ready returns 503",
    sentence="not ready: {reason}",
    remedy="wait a minute; if the problem persists, read the exporter's log",
)
CERTIFICATE_REQUIRED = Diagnosis(
    condition="the TLS handshake without a client certificate fails, and the configuration requires one",
    sentence="a server that requires client certificates listens at {base}, probably the exporter",
    remedy="",
)
PORT_TAKEN = Diagnosis(
    condition="an address is in use, and /-/healthy does not answer",
    sentence="{refusal}, and no exporter answers there",
    remedy="ss -ltnp 'sport = :{port}' shows the owner; {choose}",
)
COLLECTOR_FAILS = Diagnosis(
    condition="exporter_collector_success is 0",
    sentence="collector {collector} fails: {reason}",
    remedy="see the exporter's log, and / for the message",
)
SERIES_DROPPED = Diagnosis(
    condition="exporter_series_dropped_total has samples",
    sentence="{count} series did not fit on the metrics page",
    remedy="raise exposition.max_series, or define fewer Stats and labels",
)
TOTALS_SUPPRESSED = Diagnosis(
    condition="exporter_ledger_suppressed_ranks is above 0",
    sentence="totals of {count} ranks are absent: their state cannot be written",
    remedy="free some space in the state directory, or make the directory writable for the exporter's user",
)
NOT_RELOADED = Diagnosis(
    condition="exporter_config_last_reload_successful is 0",
    sentence="the configuration could not be reloaded; the previous one stays in force",
    remedy="training-exporter --config.file=FILE --config.check shows the problems",
)
RULES_NOT_WRITTEN = Diagnosis(
    condition="overrides.json cannot be written",
    sentence="recording rules do not reach the training processes: {error}",
    remedy="free some space in the feed directory, or remove overrides.json there",
)

# Energy and GPUs ----------------------------------------------------------------------------------------

ENERGY_COUNTED_ELSEWHERE = Diagnosis(
    condition="another exporter holds the machine's energy lock",
    sentence="process {pid} counts the energy of this machine: another exporter's energy families are absent",
    remedy="use one exporter per machine, or set energy.enabled: false in the others",
)
RAPL_UNREADABLE = Diagnosis(
    condition="energy_uj is not readable",
    sentence="{unreadable} of {counters} energy counters are unreadable",
    remedy="chmod a+r {path}; by default only root can read the counters",
)
DRIVER_MISMATCH = Diagnosis(
    condition="libnvidia-ml and the kernel module have different versions",
    sentence="the NVIDIA driver has version {driver} and NVML version {library}: NVML refuses to work",
    remedy="reboot, or load the kernel module of the same version as NVML",
)
DRIVER_NOT_LOADED = Diagnosis(
    condition="libnvidia-ml is installed and /proc/driver/nvidia is missing",
    sentence="NVML ({library}) is installed, but the NVIDIA driver is not loaded",
    remedy="run nvidia-smi, or modprobe nvidia; without a GPU remove the library or set gpu.enabled: false",
)
NVML_DOWN = Diagnosis(
    condition="gpu_nvml_up is 0, for a reason that is not in NVML_FAILURES",
    sentence="NVML does not respond: {reason}",
    remedy="see the message of the collector gpu on /, and docs/runbook.md",
)


def _nvml_failure(reason: str, sentence: str, remedy: str) -> Diagnosis:
    return Diagnosis(
        condition=f"gpu_nvml_error_info has the reason {reason}", sentence=sentence, remedy=remedy
    )


NVML_FAILURES = {
    "library_not_found": _nvml_failure(
        reason="library_not_found",
        sentence="NVML (libnvidia-ml.so.1) is not found",
        remedy="install the NVIDIA driver, or grant the container access to the GPUs (docker run --gpus all)",
    ),
    "function_not_found": _nvml_failure(
        reason="function_not_found",
        sentence="libnvidia-ml.so.1 is too old, or is not NVIDIA's library",
        remedy="check which file is loaded (ldconfig -p)",
    ),
    "gpu_not_found": _nvml_failure(
        reason="gpu_not_found",
        sentence="the NVIDIA driver finds no supported GPU",
        remedy="run nvidia-smi, and check the permissions of /dev/nvidia*",
    ),
    "driver_not_loaded": _nvml_failure(
        reason="driver_not_loaded",
        sentence="the NVIDIA driver is not loaded",
        remedy="run nvidia-smi, or modprobe nvidia",
    ),
    "no_permission": _nvml_failure(
        reason="no_permission",
        sentence="the NVIDIA driver refuses this user",
        remedy="check the permissions of /dev/nvidiactl and /dev/nvidia*",
    ),
    "binding_not_found": _nvml_failure(
        reason="binding_not_found",
        sentence="the Python package nvidia-ml-py is not installed",
        remedy="pip install nvidia-ml-py",
    ),
    "lib_rm_version_mismatch": _nvml_failure(
        reason="lib_rm_version_mismatch",
        sentence="NVML and the loaded driver have different versions: NVML refuses to work",
        remedy="reboot, or load the kernel module of the same version as NVML",
    ),
    "unknown": _nvml_failure(
        reason="unknown",
        sentence="NVML fails for an unknown reason",
        remedy="restart the container, which may have lost its devices after systemctl daemon-reload; without a container, check the kernel log",
    ),
    "hung": _nvml_failure(
        reason="hung",
        sentence="an NVML call does not return",
        remedy="check the kernel log for Xid errors",
    ),
}
"""Diagnosis of an NVML failure by the reason that the GPU collector reports."""

# Feed files that the reader refuses ---------------------------------------------------------------------

_NOT_OPEN = "start the job with umask 022, or the exporter as the job's user"
_DAMAGED = "a living process replaces the file; remove the file of a dead process"
REFUSED_FILES = {
    reason: Diagnosis(condition=f"the reader refuses a feed file: {reason}", sentence=sentence, remedy=remedy)
    for reason, sentence, remedy in (
        (
            "version",
            "{name} has another format version",
            "install the same training-exporter for job and exporter",
        ),
        (
            "name",
            "{name} is a copy of another process's file, whose samples would count twice",
            "remove the copy",
        ),
        (
            "taken",
            "{name} has samples that are counted already: a copy, or a process that ended and writes again",
            "remove the copy",
        ),
        ("too_many", "{name} exceeds the maximum number of feed files", "remove files of dead processes"),
        ("too_large", "{name} is too large", "define fewer Stats"),
        ("memory", "{name} does not fit into the memory for all feed files", "define fewer Stats"),
        ("owner", "{name} belongs to another user", "share a directory by --feed.dir and EXPORTER_FEED_DIR"),
        ("unreadable", "{name} is not readable for this user", _NOT_OPEN),
        ("lock", "the lock of {name} is not readable for this user", _NOT_OPEN),
        ("magic", "{name} is damaged (magic)", _DAMAGED),
        ("truncated", "{name} is damaged (truncated)", _DAMAGED),
        ("checksum", "{name} is damaged (checksum)", _DAMAGED),
        ("content", "{name} is damaged (content)", _DAMAGED),
        ("symlink", "{name} is a symbolic link", "remove the link: the exporter creates no links"),
        ("links", "{name} has several links", "remove the file: the exporter creates no such file"),
        ("not_regular", "{name} is not a regular file", "remove the file: the exporter creates no such file"),
    )
}
"""Diagnosis of a refused feed file by the reader's reason."""
