"""`training-exporter assets`: files for Grafana, Prometheus and systemd, from an installed wheel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from places import PROJECT
from run_support import run_to_completion

REPOSITORY_DIRECTORIES = {
    "grafana/dashboards": "dashboards/json",
    "grafana/provisioning": "dashboards/provisioning",
    "prometheus/rules": "deploy/prometheus/rules",
    "prometheus/scrape": "deploy/prometheus/scrape",
    "systemd": "deploy/systemd",
}
"""Directory of the repository, by the directory that `assets` writes."""


def run_assets(output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_to_completion([sys.executable, "-m", "exporter", "assets", f"--output={output}", *flags])


@pytest.mark.timeout(180)
def test_an_installed_wheel_writes_the_files_of_the_repository(tmp_path: Path) -> None:
    source, venv, output = tmp_path / "source", tmp_path / "venv", tmp_path / "out"
    tracked_files = run_to_completion(["git", "ls-files", "-z"], cwd=PROJECT).stdout
    tracked_names = tracked_files.rstrip("\0").split("\0")
    if tracked_names == [""]:
        pytest.skip("this is no checkout of git")
    for name in tracked_names:
        if (PROJECT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).symlink_to(PROJECT / name)  # building must not write into the repository
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={tmp_path}", str(source)]
    subprocess.run(build, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, f"--python={venv}/bin/python", "install", "--no-deps", str(wheel)], check=True)

    result = run_to_completion(
        [f"{venv}/bin/training-exporter", "assets", f"--output={output}"], cwd=tmp_path, env={}
    )

    assert (result.returncode, result.stderr) == (0, "")
    expected = {
        "prometheus/alertmanager.yaml": PROJECT / "deploy/prometheus/alertmanager.yaml",
        "runbook.md": PROJECT / "docs/runbook.md",
    }
    for target, source_directory in REPOSITORY_DIRECTORIES.items():
        paths = [path for path in (PROJECT / source_directory).rglob("*") if path.is_file()]
        expected |= {f"{target}/{path.relative_to(PROJECT / source_directory)}": path for path in paths}
    files = {str(path.relative_to(output)): path for path in output.rglob("*") if path.is_file()}
    assert set(files) == set(expected)
    assert [name for name, path in files.items() if path.read_bytes() != expected[name].read_bytes()] == []


def test_changed_files_are_replaced_only_with_force_and_a_refusal_is_one_line(tmp_path: Path) -> None:
    initial_result = run_assets(tmp_path)
    changed_file = tmp_path / "prometheus/rules/thresholds.yml"
    removed_file = tmp_path / "prometheus/alertmanager.yaml"
    original_rules = changed_file.read_text()
    changed_file.write_text("groups: []\n")
    removed_file.unlink()
    refused_result = run_assets(tmp_path)
    after_refusal = changed_file.read_text(), removed_file.exists()
    forced_result = run_assets(tmp_path, "--force")
    file_as_output_result = run_assets(changed_file)

    assert [
        result.returncode for result in (initial_result, refused_result, forced_result, file_as_output_result)
    ] == [0, 1, 0, 1]
    assert len(file_as_output_result.stderr.splitlines()) == 1
    assert after_refusal == ("groups: []\n", False)
    assert f"{changed_file} has been changed" in refused_result.stderr
    assert (changed_file.read_text(), removed_file.exists()) == (original_rules, True)


def test_the_package_itself_as_output_is_refused_with_the_reason() -> None:
    result = run_assets(PROJECT / "exporter" / "assets")

    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert "are the same file" in result.stderr
