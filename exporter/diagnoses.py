"""Diagnoses: table of known problems, which `check`, `run`, the status page and the log share.

A diagnosis has a criterion, a sentence that describes the problem, and a remedy. Sentence and remedy may contain placeholders for
facts, such as `{directory}`.
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
    """Known problem, with the placeholders of the facts in sentence and remedy."""

    criterion: str  # how the problem is recognized; not shown to users
    sentence: str
    remedy: str

    def describe(self, **facts: object) -> Statement:
        """Return sentence and remedy with the facts filled in."""
        return Statement(self.sentence.format(**facts), self.remedy.format(**facts))


# A job records nothing ----------------------------------------------------------------------------------

DISABLED = Diagnosis(
    criterion="EXPORTER_DISABLED=1 in the job's environment",
    sentence="EXPORTER_DISABLED=1 is set for {python}",
    remedy="unset EXPORTER_DISABLED for the job",
)
AUTO_DISABLED = Diagnosis(
    criterion="EXPORTER_AUTO=0, and the code records nothing",
    sentence="EXPORTER_AUTO=0 is set for {python}, and the code records nothing",
    remedy="unset EXPORTER_AUTO for the job",
)
OTHER_ENVIRONMENT = Diagnosis(
    criterion="the job's process has a different EXPORTER_FEED_DIR than `run`",
    sentence="{python} was started without the environment of `run`",
    remedy="pass EXPORTER_AUTO=1 and EXPORTER_FEED_DIR={directory} to the job",
)
NOT_INSTALLED = Diagnosis(
    criterion="the job's interpreter does not find the package",
    sentence="training-exporter is not installed for {python}{error}",
    remedy="{install}",
)
SHADOWED = Diagnosis(
    criterion="another module is called `exporter`",
    sentence="{python} imports {path} as `exporter`, instead of training-exporter",
    remedy="rename this file or folder",
)
NOTHING_RECORDED = Diagnosis(
    criterion="the package is installed, and the job uses no library with a bridge and calls no function of the package",
    sentence="{python} has training-exporter, but the job has not used an optimizer, a loader, a Stat or a training call yet",
    remedy="{calls}",
)

# Feed directory -----------------------------------------------------------------------------------------

FEED_DIRECTORY_UNREADABLE = Diagnosis(
    criterion="stat or statvfs of the feed directory fails",
    sentence="{directory}: {error}",
    remedy="choose another directory with --feed.dir",
)
FEED_DIRECTORY_FULL = Diagnosis(
    criterion="less than 4 MiB of free space in the feed directory",
    sentence="{directory} has less than 4 MiB of free space",
    remedy="free some space, or choose another directory with --feed.dir",
)
FEED_DIRECTORY_NOT_WRITABLE = Diagnosis(
    criterion="the job's user cannot create files in the feed directory",
    sentence="{directory} is not writable for the job's user",
    remedy="grant the user write access, or choose another directory with --feed.dir",
)
FEED_DIRECTORY_OPEN = Diagnosis(
    criterion="the feed directory belongs to another user, is writable for all users and has no sticky bit",
    sentence="{directory} belongs to uid {uid} and has mode {mode}: any user can remove or replace files of the jobs",
    remedy="chmod 1777 {directory}, or choose another directory with --feed.dir",
)
FOREIGN_ENTRY = Diagnosis(
    criterion="an entry of another user in a shared directory, with a name of the exporter, such as owner.lock",
    sentence="{path} belongs to uid {uid}: this exporter ignores it, and uses {used}",
    remedy="remove {path}, and restart the exporter",
)
FOREIGN_ENTRY_SHOWN = Diagnosis(
    criterion="exporter_feed_foreign_entry is 1",
    sentence="{entry} in the feed or state directory belongs to another user, and is ignored",
    remedy="remove it, and restart the exporter",
)
FEED_DIRECTORY_REMOTE = Diagnosis(
    criterion="the feed directory is on a network file system",
    sentence="{directory} is on {filesystem}, whose locks are not reliable",
    remedy="use a memory-backed directory of the node, such as /dev/shm",
)

NO_FEED = Diagnosis(
    criterion="no feed file for a minute after the start",
    sentence="no job has written to the feed directory {directory} yet",
    remedy="check that training-exporter is installed for the job's Python, that the job records something, and that the job has the"
    " same EXPORTER_FEED_DIR (or user) as this sidecar; `training-exporter check` checks all three",
)

# Sidecar ------------------------------------------------------------------------------------------------

NO_SIDECAR = Diagnosis(
    criterion="no process holds owner.lock",
    sentence="no exporter serves the feed directory",
    remedy="start one: training-exporter, or run the job with: training-exporter run COMMAND",
)
SECOND_SIDECAR = Diagnosis(
    criterion="exporter_feed_owner is 0",
    sentence="the exporter at {base} does not own its feed directory: process {owner} does, and saves the totals",
    remedy="stop one of the two exporters, or start it with a different --feed.dir",
)
NOT_READY = Diagnosis(
    criterion="/-/ready returns 503",
    sentence="not ready: {reason}",
    remedy="wait a minute; if the problem persists, read the exporter's log",
)
CERTIFICATE_REQUIRED = Diagnosis(
    criterion="the TLS handshake without a client certificate fails, and the configuration requires one",
    sentence="a server that requires client certificates listens at {base}, probably the exporter",
    remedy="",
)
PORT_TAKEN = Diagnosis(
    criterion="an address is in use, and /-/healthy does not answer",
    sentence="{refusal}, and no exporter answers there",
    remedy="ss -ltnp 'sport = :{port}' shows the owner; {choose}",
)
COLLECTOR_FAILS = Diagnosis(
    criterion="exporter_collector_success is 0",
    sentence="collector {collector} fails: {reason}",
    remedy="see the exporter's log, and / for the message",
)
TOTALS_SUPPRESSED = Diagnosis(
    criterion="exporter_ledger_suppressed_ranks is above 0",
    sentence="totals of {count} ranks are absent: their state cannot be written",
    remedy="free some space in the state directory, or make the directory writable for the exporter's user",
)
NOT_RELOADED = Diagnosis(
    criterion="exporter_config_last_reload_successful is 0",
    sentence="the configuration could not be reloaded; the previous configuration stays in force",
    remedy="training-exporter --config.file=FILE --config.check shows the problems",
)
STAT_RULES_NOT_WRITTEN = Diagnosis(
    criterion="overrides.json cannot be written",
    sentence="the rules of `recording:` do not reach the training processes: {problem}: {directory}",
    remedy="{remedy}",
)

# Energy and GPUs ----------------------------------------------------------------------------------------

ENERGY_COUNTED_ELSEWHERE = Diagnosis(
    criterion="another exporter holds the machine's energy lock",
    sentence="process {pid} counts the energy of this machine, so that other exporters publish no energy",
    remedy="use one exporter per machine, or set energy.enabled: false in the others",
)
RAPL_UNREADABLE = Diagnosis(
    criterion="energy_uj is not readable",
    sentence="{unreadable} of {counters} energy counters are unreadable",
    remedy="chmod a+r {path}; by default only root can read the counters",
)
DRIVER_MISMATCH = Diagnosis(
    criterion="libnvidia-ml and the kernel module have different versions",
    sentence="the NVIDIA driver has version {driver} and NVML version {library}: NVML refuses to work",
    remedy="reboot, or load the kernel module of the same version as NVML",
)
DRIVER_NOT_LOADED = Diagnosis(
    criterion="libnvidia-ml is installed and /proc/driver/nvidia is missing",
    sentence="NVML ({library}) is installed, but the NVIDIA driver is not loaded",
    remedy="run nvidia-smi, or modprobe nvidia; without a GPU remove the library or set gpu.enabled: false",
)
NVML_DOWN = Diagnosis(
    criterion="gpu_nvml_up is 0, for a reason that is not in NVML_FAILURES",
    sentence="NVML does not respond: {reason}",
    remedy="see the message of the collector gpu on /, and docs/runbook.md",
)


def _nvml_failure(reason: str, sentence: str, remedy: str) -> Diagnosis:
    """Return the diagnosis of a reason of `gpu_nvml_error_info`."""
    return Diagnosis(
        criterion=f"gpu_nvml_error_info has the reason {reason}", sentence=sentence, remedy=remedy
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
"""Diagnosis of an NVML failure, by the reason that the GPU collector reports."""

# Feed files that the reader refuses ---------------------------------------------------------------------


def _refused_file(reason: str, sentence: str, remedy: str) -> Diagnosis:
    """Return the diagnosis of a reason for which the reader refuses a feed file."""
    criterion = f"the reader refuses a feed file: {reason}"
    return Diagnosis(criterion=criterion, sentence=sentence, remedy=remedy)


_NOT_READABLE_REMEDY = "start the job with umask 022, or run the exporter as the job's user"
_DAMAGED_REMEDY = "a running process replaces the file; remove the file of an exited process"
REFUSED_FILES = {
    "version": _refused_file(
        reason="version",
        sentence="{name} has a different format version",
        remedy="install the same version of training-exporter for the job and the exporter",
    ),
    "name": _refused_file(
        reason="name",
        sentence="{name} is a copy of another process's file, whose samples would count twice",
        remedy="remove the copy",
    ),
    "taken": _refused_file(
        reason="taken",
        sentence="{name} has samples that are already counted: a copy, or a process that exited and writes again",
        remedy="remove the copy",
    ),
    "too_many": _refused_file(
        reason="too_many",
        sentence="{name} exceeds the maximum of 4,096 feed files",
        remedy="remove files of exited processes",
    ),
    "too_large": _refused_file(
        reason="too_large", sentence="{name} is larger than 4 MiB", remedy="define fewer Stats"
    ),
    "memory": _refused_file(
        reason="memory",
        sentence="{name} does not fit into the 64 MiB of memory for all feed files",
        remedy="define fewer Stats",
    ),
    "owner": _refused_file(
        reason="owner",
        sentence="{name} belongs to another user",
        remedy="share a directory by --feed.dir and EXPORTER_FEED_DIR",
    ),
    "unreadable": _refused_file(
        reason="unreadable", sentence="{name} is not readable for this user", remedy=_NOT_READABLE_REMEDY
    ),
    "lock": _refused_file(
        reason="lock",
        sentence="the lock of {name} is not readable for this user",
        remedy=_NOT_READABLE_REMEDY,
    ),
    "magic": _refused_file(reason="magic", sentence="{name} is damaged (magic)", remedy=_DAMAGED_REMEDY),
    "truncated": _refused_file(
        reason="truncated", sentence="{name} is damaged (truncated)", remedy=_DAMAGED_REMEDY
    ),
    "checksum": _refused_file(
        reason="checksum", sentence="{name} is damaged (checksum)", remedy=_DAMAGED_REMEDY
    ),
    "content": _refused_file(
        reason="content", sentence="{name} is damaged (content)", remedy=_DAMAGED_REMEDY
    ),
    "symlink": _refused_file(
        reason="symlink",
        sentence="{name} is a symbolic link",
        remedy="remove the link: the exporter creates no links",
    ),
    "links": _refused_file(
        reason="links",
        sentence="{name} has several links",
        remedy="remove the file: the exporter creates no such file",
    ),
    "not_regular": _refused_file(
        reason="not_regular",
        sentence="{name} is not a regular file",
        remedy="remove the file: the exporter creates no such file",
    ),
}
"""Diagnosis of a refused feed file, by the reason that the reader reports."""
