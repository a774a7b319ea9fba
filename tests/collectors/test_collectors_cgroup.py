"""Cgroups v2, v1 and hybrid: location of the limits, and meaning of the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from collectors_support import MACHINES, assert_golden, assert_sound, copy_machine, text_of, value_of

from exporter.collectors.host.cgroup import CgroupCollector
from exporter.collectors.host.cgroup_tree import CgroupTree
from exporter.families import Collected

CPU_LIMIT = "cgroup_cpu_limit_cpus"
MEMORY_CURRENT, MEMORY_LIMIT = "cgroup_memory_current_bytes", "cgroup_memory_limit_bytes"
STEP_CGROUP = "/system.slice/slurmstepd.scope/job_4711/step_0"


def collector_of(root: Path) -> CgroupCollector:
    return CgroupCollector(proc=root / "proc", sys=root / "sys")


def cgroups_by_scope(collected: Collected) -> dict[str, tuple[str, str]]:
    """Return version and path of the cgroup by resource."""
    info = next(metric for metric in collected if metric.name == "cgroup")
    return {
        sample.labels["scope"]: (sample.labels["version"], sample.labels["path"]) for sample in info.samples
    }


def write_machine(root: Path, membership: str, mountinfo: str, files: Mapping[str, str]) -> Path:
    """Write the files of a machine: /proc/self/cgroup, /proc/self/mountinfo, and further files by path."""
    for name, content in {"proc/self/cgroup": membership, "proc/self/mountinfo": mountinfo, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.parametrize("name", ["separate", "container"])  # for the others, see test_collectors_machines
def test_a_recorded_machine_has_the_expected_exposition(name: str) -> None:
    collector = collector_of(MACHINES / name)
    collected = collector.collect()

    assert_sound(collector, collected)
    assert collected.problems == []
    assert_golden(text_of(collected), MACHINES / f"{name}.metrics")


def test_without_a_limit_the_own_cgroup_is_read(tmp_path: Path) -> None:
    root = copy_machine("node", tmp_path)
    for name in ("cpu.max", "memory.max"):
        for path in (root / "sys/fs/cgroup").rglob(name):
            path.write_text("max 100000\n" if name == "cpu.max" else "max\n")
    collected = collector_of(root).collect()

    assert value_of(collected, CPU_LIMIT) is None
    assert value_of(collected, MEMORY_LIMIT) is None
    assert value_of(collected, MEMORY_CURRENT) == 20971520
    assert cgroups_by_scope(collected)["memory"] == ("2", f"{STEP_CGROUP}/user/task_0")
    assert collected.problems == []


def test_the_nearest_ancestor_with_the_controller_is_read(tmp_path: Path) -> None:
    root = copy_machine("node", tmp_path)
    for path in (root / "sys/fs/cgroup").rglob("memory.max"):
        path.unlink()
    (root / f"sys/fs/cgroup{STEP_CGROUP}/user/task_0/memory.current").unlink()
    collected = collector_of(root).collect()

    assert value_of(collected, MEMORY_CURRENT) == 206158430000
    assert cgroups_by_scope(collected)["memory"] == ("2", f"{STEP_CGROUP}/user")


def test_oom_kills_of_cgroup_v1_are_summed_over_ancestors(tmp_path: Path) -> None:
    root = copy_machine("virtual", tmp_path)
    (root / "sys/fs/cgroup/memory/memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
    (root / "sys/fs/cgroup/memory/process_api/memory.oom_control").write_text("under_oom 0\noom_kill 3\n")

    assert value_of(collector_of(root).collect(), "cgroup_memory_events_total", "oom_kill") == 5


def test_a_process_moved_to_another_cgroup_is_followed(tmp_path: Path) -> None:
    root = copy_machine("node", tmp_path)
    collector = collector_of(root)
    collector.collect()
    (root / "proc/self/cgroup").write_text("0::/system.slice/slurmstepd.scope/job_4711\n")
    collected = collector.collect()

    assert value_of(collected, CPU_LIMIT) == 6.5
    assert cgroups_by_scope(collected)["memory"] == ("2", "/system.slice/slurmstepd.scope/job_4711")


CGROUP2_MOUNT = "30 1 0:26 {root} /sys/fs/cgroup rw - cgroup2 cgroup rw,nsdelegate\n"


@pytest.mark.parametrize(
    ("membership", "root", "directories"),
    [
        ("0::/\n", "/", ["/"]),
        ("0::/a/b\n", "/", ["/a/b", "/a", "/"]),
        ("0::/a/b\n", "/a", ["/a/b", "/a"]),  # /a is the root of the mount
        ("0::/a/b (deleted)\n", "/", ["/a/b", "/a", "/"]),
        ("0::/a/gone\n", "/", ["/a", "/"]),
        ("0::/../outside\n", "/", ["/"]),
        ("0::/other\n", "/a", []),  # the mounted part does not contain the cgroup
        ("0::/\n", "/../..", []),  # the host's tree: the part of the container is unknown
        ("0::/../b\n", "/..", ["/../b", "/.."]),
        ("0::/../../a\n", "/..", []),
        # Line separators of Unicode, which the kernel does not use as such.
        ("0::/a:b\x1c\u2028c\n", "/", ["/a:b\x1c\u2028c", "/"]),
        ("1:name=systemd:/a\n", "/", []),
    ],
)
def test_the_ancestors_are_found_in_every_kind_of_namespace(
    tmp_path: Path, membership: str, root: str, directories: list[str]
) -> None:
    tree = write_machine(tmp_path, membership, CGROUP2_MOUNT.format(root=root), {})
    for name in ("a/b", "a:b\x1c\u2028c", "b"):
        (tree / "sys/fs/cgroup" / name).mkdir(parents=True)
    hierarchies = CgroupTree(proc=tree / "proc", sys=tree / "sys").hierarchies()

    assert [level.path for hierarchy in hierarchies.values() for level in hierarchy.levels] == directories


def test_the_root_cgroup_without_memory_files_is_not_a_problem(tmp_path: Path) -> None:
    stat = "usage_usec 3\nuser_usec 2\nsystem_usec 1\n"
    root = write_machine(tmp_path, "0::/\n", CGROUP2_MOUNT.format(root="/"), {"sys/fs/cgroup/cpu.stat": stat})
    collected = collector_of(root).collect()

    assert value_of(collected, "cgroup_cpu_usage_seconds_total", "user") == 2e-6
    assert collected.problems == []
    assert set(cgroups_by_scope(collected)) == {"cpu"}
    assert f"no {tmp_path}/sys/fs/cgroup/memory.current" in collected.unsupported


# Real cgroups of this machine --------------------------------------------------------------------------------------

MEASURING_PROGRAM = """
import json, sys
for directory in sys.argv[1:]:
    open(directory + "/cgroup.procs", "w").write("0")
memory = bytearray(64 << 20)
from exporter.collectors.host.cgroup import CgroupCollector
collected = CgroupCollector().collect()
print(json.dumps({
    sample.name + ",".join(("", *sample.labels.values())): sample.value
    for metric in collected for sample in metric.samples
} | {"problems": collected.problems}))
"""
"""Program that joins cgroups, uses 64 MiB, and prints the samples of the collector. Arguments: DIRECTORY..."""


@pytest.fixture
def limited_cgroups() -> Iterator[list[Path]]:
    """Create a cgroup with limits and a child cgroup in the hierarchies of v1."""
    limits = {"cpu/cpu.cfs_quota_us": "150000", "memory/memory.limit_in_bytes": str(512 << 20)}
    leaves: list[Path] = []
    try:
        for path, limit in limits.items():
            controller, _, limit_file = path.partition("/")
            leaf = Path(f"/sys/fs/cgroup/{controller}/exporter-test-{os.getpid()}/leaf")
            leaf.parent.mkdir()
            leaves.append(leaf)
            (leaf.parent / limit_file).write_text(limit)
            leaf.mkdir()
        yield leaves
    except OSError:
        pytest.skip("needs cgroup v1 and permission to create cgroups")
    finally:
        for directory in (
            directory for leaf in leaves for directory in (leaf, leaf.parent) if directory.exists()
        ):
            directory.rmdir()


def test_real_cgroup_files_show_the_configured_limits(limited_cgroups: list[Path]) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", MEASURING_PROGRAM, *map(str, limited_cgroups)],
        capture_output=True,
        text=True,
        check=True,
    )
    samples = json.loads(completed.stdout)
    cgroup = f"/exporter-test-{os.getpid()}"

    assert samples["problems"] == []
    assert samples["cgroup_cpu_limit_cpus"] == 1.5
    assert samples["cgroup_memory_limit_bytes"] == 512 << 20
    assert 64 << 20 < samples["cgroup_memory_current_bytes"] < 512 << 20
    assert samples["cgroup_memory_stat_bytes,anon"] > 64 << 20
    assert samples[f"cgroup_info,1,{cgroup},memory"] == 1
    assert samples[f"cgroup_info,1,{cgroup},cpu"] == 1
