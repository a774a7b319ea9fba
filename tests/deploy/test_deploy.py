"""Validity and consistency of deploy/: image, compose demo, Prometheus, Alertmanager, the mixin and the systemd unit."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deploy_support import DEPLOY, DOCKERFILE, KUBERNETES, load_documents, require_program, run, validate
from places import PROJECT
from rules_support import alerts, labels_by_name, load_yaml, promtool, rules
from run_support import child_environment, free_port
from serve_support import sidecar

from exporter.cli.main import main

COMPOSE = load_yaml(DEPLOY / "compose/compose.yaml")
UNIT = (DEPLOY / "systemd/training-exporter.service").read_text(encoding="utf-8")


# --- YAML and shell ------------------------------------------------------------------------------------------


def test_yaml_files_pass_yamllint() -> None:
    yamllint, folders = (
        require_program("yamllint", "the extra `test`"),
        (DEPLOY, PROJECT / "dashboards/provisioning"),
    )
    completed_run = run(yamllint, "--strict", "-c", DEPLOY / ".yamllint.yaml", *folders)

    assert completed_run.returncode == 0, completed_run.stdout


def test_shell_scripts_pass_shellcheck() -> None:
    scripts = sorted([*DEPLOY.glob("slurm/*"), *DEPLOY.glob("systemd/*.sh")])
    completed_run = run(require_program("shellcheck", "shellcheck"), *scripts)

    assert len(scripts) >= 5
    assert completed_run.returncode == 0, completed_run.stdout


# --- the image -----------------------------------------------------------------------------------------------


def test_the_image_passes_hadolint_and_runs_the_health_check_unprivileged() -> None:
    completed_run = run(require_program("hadolint", "the extra `test`"), DEPLOY / "docker/Dockerfile")
    last_stage = DOCKERFILE.rpartition("\nFROM ")[2]

    assert completed_run.returncode == 0, completed_run.stderr
    assert completed_run.stdout == ""
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", last_stage, re.MULTILINE)
    assert 'CMD ["python", "/healthcheck.py"]' in last_stage


def test_every_file_that_the_image_copies_exists_and_is_not_ignored() -> None:
    ignore = (DEPLOY / "docker/Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    copied_paths: list[str] = re.findall(r"^COPY (?!--from)(\S+) ", DOCKERFILE, re.MULTILINE)

    assert copied_paths
    assert [name for name in copied_paths if not (PROJECT / name).exists()] == []
    assert [name for name in copied_paths if f"!{name.rstrip('/')}" not in ignore] == []


def test_the_image_has_every_dependency_by_hash() -> None:
    lock = (DEPLOY / "docker/requirements.lock").read_text(encoding="utf-8").replace("\\\n", " ")
    hashes_by_package = dict(
        re.findall(r"^([\w-]+)==\S+((?:\s+--hash=sha256:[0-9a-f]{64})+)\s*$", lock, re.MULTILINE)
    )
    project = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = re.search(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert dependencies is not None
    names = set(re.findall(r'^ *"([\w-]+)', dependencies[1], re.MULTILINE))

    assert set(hashes_by_package) == names | {"bcrypt", "markupsafe"}  # jinja2 needs markupsafe


def test_the_health_check_detects_a_running_exporter(tmp_path: Path) -> None:
    healthcheck = DEPLOY / "docker/healthcheck.py"
    with sidecar(tmp_path) as running:
        run_beside_exporter = run(sys.executable, healthcheck, EXPORTER_HEALTH_ADDRESS=running.address)
    run_without_exporter = run(
        sys.executable, healthcheck, EXPORTER_HEALTH_ADDRESS=f"127.0.0.1:{free_port()}"
    )

    assert run_beside_exporter.returncode == 0, run_beside_exporter.stderr
    assert run_beside_exporter.stderr == ""
    assert run_without_exporter.returncode == 1
    assert "is not healthy: ConnectionRefusedError" in run_without_exporter.stderr


def test_the_image_has_the_runbook_that_the_server_needs() -> None:
    assert "COPY docs/runbook.md /src/" in DOCKERFILE
    assert "/src/runbook.md /venv/lib/python3.12/site-packages/exporter/assets/runbook.md" in DOCKERFILE


# --- compose and Grafana -------------------------------------------------------------------------------------


def test_mounts_of_the_compose_demo_exist_and_dependencies_are_services() -> None:
    validate(COMPOSE, "compose")
    services = COMPOSE["services"]
    mounts = [volume.split(":") for service in services.values() for volume in service.get("volumes", [])]
    files = [DEPLOY / "compose" / source for source, *_ in mounts if source.startswith(".")]
    dependencies = {name for service in services.values() for name in service.get("depends_on", [])}

    assert files
    assert [str(path) for path in files if not path.exists()] == []
    assert {source for source, *_ in mounts if not source.startswith(".")} <= set(COMPOSE["volumes"])
    assert dependencies <= set(services)
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"])


def test_grafana_of_the_compose_demo_finds_data_source_and_dashboards() -> None:
    grafana = COMPOSE["services"]["grafana"]
    provisioning = PROJECT / "dashboards/provisioning"
    data_source = load_yaml(provisioning / "datasources/prometheus.yaml")["datasources"][0]
    provider = load_yaml(provisioning / "dashboards/training-exporter.yaml")["providers"][0]
    scrape_interval = load_yaml(DEPLOY / "compose/prometheus.yml")["global"]["scrape_interval"]
    source_by_target = {
        target: source for source, target, _ in (volume.split(":") for volume in grafana["volumes"][:-1])
    }

    for path in (PROJECT / "dashboards/provisioning").rglob("*.y*ml"):
        validate(load_yaml(path), f"grafana {path.parent.name}")
    assert data_source["url"].removeprefix("$") in grafana["environment"]
    # With another interval, panels are empty when zoomed in.
    assert data_source["jsonData"]["timeInterval"] == scrape_interval
    assert source_by_target[provider["options"]["path"]] == "../../dashboards/json"
    assert (PROJECT / "dashboards/json/training-run.json").is_file()


# --- Prometheus and Alertmanager -----------------------------------------------------------------------------

SCRAPE_FILES = sorted([*(DEPLOY / "prometheus/scrape").glob("*.yaml"), DEPLOY / "compose/prometheus.yml"])


def scrape_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in SCRAPE_FILES:
        for job in load_yaml(path)["scrape_configs"]:
            yield path.name, job


@pytest.mark.parametrize("path", SCRAPE_FILES, ids=lambda path: path.name)
def test_promtool_accepts_a_scrape_configuration(path: Path, tmp_path: Path) -> None:
    require_program("promtool", "prometheus")
    # Debian builds Prometheus without Kubernetes discovery: the local schema checks this line.
    configuration = path.read_text(encoding="utf-8")
    for config in re.findall(r"kubernetes_sd_configs: (.*)", configuration):
        validate(load_documents(config)[0], "kubernetes_sd_configs")
    copy = tmp_path / path.name
    copy.write_text(re.sub(r"kubernetes_sd_configs: .*", "static_configs: []", configuration))

    agent = ["--agent"] if path.name == "agent.yaml" else []
    completed_run = promtool("check", "config", "--syntax-only", *agent, copy)

    assert completed_run.returncode == 0, completed_run.stdout + completed_run.stderr


def test_scrape_limits_exceed_the_limits_of_the_exporter() -> None:
    training_jobs = [job for _, job in scrape_configs() if job["job_name"].startswith("training")]
    example = load_yaml(PROJECT / "config.example.yaml")

    assert len(training_jobs) == 5
    assert all(job["sample_limit"] > example["exposition"]["max_series"] for job in training_jobs)
    assert len({job["label_value_length_limit"] for job in training_jobs}) == 1


def test_scrape_jobs_have_the_names_that_the_alerts_select() -> None:
    patterns = {pattern for rule in alerts() for pattern in re.findall(r'\bjob=~"([^"]+)"', rule.expr)}
    exact_names = {job_name for rule in alerts() for job_name in re.findall(r'\bjob="([^"]+)"', rule.expr)}
    names = {job["job_name"] for _, job in scrape_configs()} - {"prometheus"}
    pod_monitor_jobs = {
        rule["replacement"]
        for path in KUBERNETES.rglob("podmonitor.yaml")
        for rule in load_yaml(path)["spec"]["podMetricsEndpoints"][0]["relabelings"]
        if rule["targetLabel"] == "job"
    }

    assert exact_names
    assert exact_names <= names
    assert patterns
    assert [
        name for name in names | pod_monitor_jobs for pattern in patterns if not re.fullmatch(pattern, name)
    ] == []


def test_amtool_accepts_the_alertmanager_configuration_and_its_alerts_exist() -> None:
    file = DEPLOY / "prometheus/alertmanager.yaml"
    completed_run = run(require_program("amtool", "prometheus-alertmanager"), "check-config", file)
    matchers = re.findall(r'alertname[!=~]+"([^"]+)"', file.read_text(encoding="utf-8"))
    alert_names = {name for matcher in matchers for name in matcher.split("|")}

    assert completed_run.returncode == 0, completed_run.stdout + completed_run.stderr
    assert alert_names
    assert alert_names <= {alert.name for alert in alerts()}


def test_the_mixin_has_all_rules_and_dashboards_with_the_links_of_a_site() -> None:
    jsonnet = pytest.importorskip("_gojsonnet", reason="install the extra `test`")
    site = (
        "{links: {grafana: 'https://g', runbook: 'https://r'}, thresholds: {'threshold:gpu_idle:ratio': 0.1}}"
    )
    snippet = f"local m = (import '{PROJECT}/mixin.libsonnet') + {{_config+:: {site}}};"
    snippet += "{alerts: m.prometheusAlerts, rules: m.prometheusRules, boards: m.grafanaDashboards}"

    mixin = json.loads(jsonnet.evaluate_snippet("site.jsonnet", snippet))
    resource_rules = [
        rule
        for rule_type in ("alerts", "rules")
        for group in mixin[rule_type]["groups"]
        for rule in group["rules"]
    ]
    rules_by_record = {rule.get("record"): rule for rule in resource_rules}
    names = sorted(rule.get("alert") or rule["record"] for rule in resource_rules)
    assert names == sorted(rule.name for rule in rules())
    assert set(mixin["boards"]) == {path.name for path in (PROJECT / "dashboards/json").glob("*.json")}
    assert rules_by_record["site:links:info"]["labels"] == {"grafana": "https://g", "runbook": "https://r"}
    assert rules_by_record["threshold:gpu_idle:ratio"]["expr"] == "vector(0.1)"


# --- systemd -------------------------------------------------------------------------------------------------


def test_systemd_accepts_the_unit_and_rates_it_as_confined(tmp_path: Path) -> None:
    copy = tmp_path / "training-exporter.service"
    copy.write_text(UNIT.replace("/opt/training-exporter/bin/python", sys.executable))

    analyze = require_program("systemd-analyze", "systemd")
    completed_run = run(analyze, "verify", "--man=no", copy)
    # The threshold is ten times the exposure level: at most 1.9 of 10.
    analysis = run(analyze, "security", "--offline=true", "--threshold=19", copy)

    assert completed_run.returncode == 0, completed_run.stderr
    assert completed_run.stderr == ""
    assert analysis.returncode == 0, analysis.stdout
    assert "DeviceAllow=char-nvidia* rw" in UNIT  # the names in /proc/devices depend on the driver


def test_the_unit_starts_the_exporter_with_known_flags(tmp_path: Path) -> None:
    command = re.search(r"^ExecStart=\S+ -m exporter (.*)$", UNIT, re.MULTILINE)
    assert command is not None
    (tmp_path / "config.yaml").write_text("")
    flags = command[1].replace("/etc/training-exporter", str(tmp_path))

    assert main(["--config.check", *shlex.split(flags)], child_environment()) == 0


# --- documents -----------------------------------------------------------------------------------------------

DOCUMENTS = [PROJECT / "docs/operations.md", PROJECT / "docs/runbook.md", DEPLOY / "README.md"]
FAMILY_PREFIXES = ("cgroup_", "exporter_", "gpu_", "host_", "process_", "training_")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_families_named_in_documents_exist(document: Path) -> None:
    # A native histogram has the name without the suffix.
    names = {*labels_by_name(), *(name.removesuffix("_bucket") for name in labels_by_name())}
    named_families = {
        name
        for name in re.findall(r"`([a-z]\w+)[`{]", document.read_text(encoding="utf-8"))
        if name.startswith(FAMILY_PREFIXES)
    }

    assert named_families
    assert sorted(named_families - names) == []
