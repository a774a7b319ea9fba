"""Validity and consistency of deploy/, as far as they can be checked without a cluster."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # the package has no types
import pytest
import yaml
from places import PROJECT
from rules_support import alerts, labels_by_name, load_yaml, promtool, rules
from run_support import child_environment, free_port, run_to_completion
from serve_support import sidecar

from exporter.cli.main import main

DEPLOY = PROJECT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
CHART = DEPLOY / "helm/training-exporter"
SCHEMAS = load_yaml(PROJECT / "tests/data/deploy/schemas.yaml")
OVERLAYS = sorted(
    path.parent for path in KUBERNETES.rglob("kustomization.yaml") if path.parent.name != "dashboards"
)
DOCKERFILE = (DEPLOY / "docker/Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
COMPOSE = load_yaml(DEPLOY / "compose/compose.yaml")
UNIT = (DEPLOY / "systemd/training-exporter.service").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
KUBERNETES_VERSION = "1.34"
"""Version of Kubernetes whose schemas validate the manifests: the first with resource.k8s.io/v1, which an overlay uses."""


def require_program(name: str, package: str) -> str:
    """Return the path of a validator. Without the validator, skip the test and name the package to install."""
    executable = shutil.which(name) or shutil.which(name, path=str(BIN))
    if executable is None:
        pytest.skip(f"install {package} for {name}")
    return executable


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_to_completion([str(argument) for argument in command], env=child_environment(**variables))


def load_documents(text: str) -> list[Any]:
    """Return the documents of a YAML text. The C parser takes a tenth of the time of the Python parser."""
    return list(yaml.load_all(text, Loader=yaml.CSafeLoader))


def validate(document: Any, schema_name: str) -> None:
    """Validate a document against the local schema, in which an unused key is an error."""
    jsonschema.validate(document, SCHEMAS[schema_name])


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


# --- Kubernetes ----------------------------------------------------------------------------------------------


def build_kustomization(folder: Path) -> list[dict[str, Any]]:
    kubectl = require_program("kubectl", "kubectl 1.27 or later")
    completed_run = run(kubectl, "kustomize", "--load-restrictor", "LoadRestrictionsNone", folder)
    assert completed_run.returncode == 0, completed_run.stderr
    return load_documents(completed_run.stdout)


def validate_manifest(document: dict[str, Any]) -> None:
    """Validate a manifest against the schema of Kubernetes, or the local schema of a custom resource."""
    if document["apiVersion"].startswith("monitoring.coreos.com/"):
        validate(document, document["kind"])
    elif not document["apiVersion"].startswith("kustomize."):
        kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the extra `test`")
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize(
    "path", sorted(KUBERNETES.rglob("*.yaml")), ids=lambda path: str(path.relative_to(KUBERNETES))
)
def test_a_manifest_is_valid(path: Path) -> None:
    for document in load_documents(path.read_text(encoding="utf-8")):
        validate_manifest(document)


def pod_specs(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if document["kind"] in {"Job", "DaemonSet"}:
        yield document["spec"]["template"]["spec"]


def render_chart(*values: str, folder: Path = CHART, operator: bool = True) -> list[dict[str, Any]]:
    """Return the documents that Helm renders with these values, in a cluster with or without Prometheus' operator."""
    helm = require_program("helm", "the extra `test`")
    crds = ["--api-versions", "monitoring.coreos.com/v1"] if operator else []
    settings = [argument for setting in values for argument in ("--set", setting)]
    completed_run = run(helm, "template", "release", folder, *crds, *settings)
    assert completed_run.returncode == 0, completed_run.stderr
    return [document for document in load_documents(completed_run.stdout) if document]


CHART_SETTINGS = {
    "node": ["sidecar.enabled=false"],
    "node without GPUs": ["sidecar.enabled=false", "node.gpu.enabled=false"],
    "job": ["node.enabled=false", "sidecar.job.enabled=true"],
}
"""Settings with which the chart has one pod, by name of the pod."""


@pytest.mark.parametrize(
    "build",
    [
        *(pytest.param(partial(build_kustomization, folder), id=folder.name) for folder in OVERLAYS),
        *(
            pytest.param(partial(render_chart, *values), id=f"chart: {name}")
            for name, values in CHART_SETTINGS.items()
        ),
    ],
)
def test_the_exporter_of_a_pod_is_unprivileged_scraped_and_started_with_known_flags(
    build: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    documents = build()
    for document in documents:
        validate_manifest(document)
    (pod,) = (pod for document in documents for pod in pod_specs(document))
    (container,) = (
        container
        for container in [*pod["initContainers"], *pod["containers"]]
        if container["name"] == "exporter"
    )
    (monitor,) = (document for document in documents if document["kind"] == "PodMonitor")
    files = {name: content for document in documents for name, content in document.get("data", {}).items()}
    arguments = []
    for argument in container["args"]:
        flag, _, setting = argument.partition("=")
        if flag == "--config.file":
            (tmp_path / "config.yaml").write_text(files[Path(setting).name])
            setting = str(tmp_path / "config.yaml")
        arguments.append(f"{flag}={setting}")

    assert main(["--config.check", *arguments], child_environment()) == 0
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert "cpu" not in container["resources"].get("limits", {})
    (port,) = container["ports"]
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == port["name"]
    assert len(port["name"]) <= 15  # the API server's limit, which no schema has


def test_the_chart_renders_no_resource_of_an_operator_that_the_cluster_lacks() -> None:
    kinds = {document["kind"] for document in render_chart(operator=False)}

    assert "DaemonSet" in kinds
    assert kinds.isdisjoint({"PodMonitor", "PrometheusRule"})


def test_the_chart_serves_tls_with_probes_that_need_no_certificate() -> None:
    documents = render_chart("webConfig.secretName=web", "podMonitor.endpoint.scheme=https")
    (daemon_set,) = (document for document in documents if document["kind"] == "DaemonSet")
    (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
    monitors = [document for document in documents if document["kind"] == "PodMonitor"]

    assert "--web.config.file=/etc/training-exporter-web/web.yml" in container["args"]
    assert all(
        "tcpSocket" in container[probe] for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    )
    assert [monitor["spec"]["podMetricsEndpoints"][0]["scheme"] for monitor in monitors] == ["https", "https"]


def test_the_chart_puts_the_resources_of_the_sidecar_into_the_namespaces_of_the_jobs() -> None:
    peers = "networkPolicy.from[0].namespaceSelector.matchLabels.team=monitoring"
    documents = render_chart("sidecar.namespaces={team-a,team-b}", "networkPolicy.enabled=true", peers)
    namespaces_by_kind = {
        kind: {document["metadata"]["namespace"] for document in documents if document["kind"] == kind}
        for kind in ("ConfigMap", "NetworkPolicy")
    }
    (monitor,) = (
        document
        for document in documents
        if document["metadata"]["name"].endswith("-sidecar") and document["kind"] == "PodMonitor"
    )

    assert namespaces_by_kind["NetworkPolicy"] == {"team-a", "team-b"} <= namespaces_by_kind["ConfigMap"]
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["team-a", "team-b"]}


def test_a_digest_a_priority_and_an_account_reach_the_pods_of_the_chart() -> None:
    digest = f"sha256:{'0' * 64}"
    documents = render_chart(
        f"image.digest={digest}", "node.priorityClassName=high", "serviceAccount.name=watcher"
    )
    (daemon_set,) = (document for document in documents if document["kind"] == "DaemonSet")
    pod = daemon_set["spec"]["template"]["spec"]

    assert pod["containers"][0]["image"] == f"example.org/training-exporter@{digest}"
    assert pod["priorityClassName"] == "high"
    assert pod["serviceAccountName"] == "watcher"
    assert "watcher" in {
        document["metadata"]["name"] for document in documents if document["kind"] == "ServiceAccount"
    }


def test_helm_lint_accepts_the_chart_and_its_values() -> None:
    helm = require_program("helm", "the extra `test`")
    lint_run = run(helm, "lint", "--strict", CHART)
    run_with_unknown_value = run(helm, "template", CHART, "--set", "node.prot=3")
    crds = ("--api-versions", "monitoring.coreos.com/v1")
    run_with_unknown_threshold = run(
        helm, "template", CHART, *crds, "--set", "prometheusRule.thresholds.threshold:x=3"
    )

    assert lint_run.returncode == 0, lint_run.stdout
    assert "Additional property prot is not allowed" in run_with_unknown_value.stderr
    assert "rules/thresholds.yml has no threshold:x" in run_with_unknown_threshold.stderr


def test_the_chart_has_every_rule_dashboard_and_site_threshold() -> None:
    documents = render_chart(
        "prometheusRule.thresholds.threshold:gpu_idle:ratio=0.1", "prometheusRule.links.grafana=https://g"
    )
    (resource,) = (document for document in documents if document["kind"] == "PrometheusRule")
    resource_rules = [rule for group in resource["spec"]["groups"] for rule in group["rules"]]
    rules_by_record = {rule["record"]: rule for rule in resource_rules if "record" in rule}
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    dashboards = {
        name: content for document in documents for name, content in document.get("data", {}).items()
    }

    assert len(set(names)) == len(names)
    assert len(resource_rules) == len(rules())
    assert {rule.expr.strip() for rule in rules()} - {rule["expr"].strip() for rule in resource_rules} == {
        "vector(0.05)"
    }
    assert rules_by_record["threshold:gpu_idle:ratio"]["expr"] == "vector(0.1)"
    assert rules_by_record["site:links:info"]["labels"] == {"grafana": "https://g"}
    for path in (PROJECT / "dashboards/json").glob("*.json"):
        assert json.loads(dashboards[path.name]) == json.loads(path.read_text(encoding="utf-8"))


def test_environment_volumes_and_annotations_reach_the_containers_of_the_chart() -> None:
    node_settings = (
        "node.extraEnv[0].name=A",
        "node.extraVolumes[0].name=v",
        "node.extraVolumeMounts[0].name=v",
    )
    sidecar_settings = tuple(setting.replace("node", "sidecar", 1) for setting in node_settings)
    documents = render_chart(
        *node_settings, *sidecar_settings, "node.podAnnotations.team=ml", "sidecar.job.enabled=true"
    )
    pods = [
        document["spec"]["template"] for document in documents if document["kind"] in {"DaemonSet", "Job"}
    ]

    assert pods[0]["metadata"]["annotations"]["team"] == "ml"
    for pod, container_list in ((pods[0], "containers"), (pods[1], "initContainers")):
        container = pod["spec"][container_list][0]
        assert "A" in {variable["name"] for variable in container["env"]}
        assert "v" in {mount["name"] for mount in container["volumeMounts"]}
        assert "v" in {volume["name"] for volume in pod["spec"]["volumes"]}


def test_the_network_policy_of_the_chart_needs_peers() -> None:
    # Kubernetes would allow all peers for an empty list.
    completed_run = run(
        require_program("helm", "helm"), "template", "x", CHART, "--set=networkPolicy.enabled=true"
    )

    assert completed_run.returncode != 0
    assert "networkPolicy.from: name the peers" in completed_run.stderr


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


def test_the_image_has_the_runbook_that_the_server_needs() -> None:
    assert "COPY docs/runbook.md /src/" in DOCKERFILE
    assert "/src/runbook.md /venv/lib/python3.12/site-packages/exporter/assets/runbook.md" in DOCKERFILE


def test_a_parent_chart_can_add_the_sidecar_to_a_pod_of_its_own(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "charts/training-exporter")
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("{apiVersion: v2, name: mine, version: 1.0.0}")
    (tmp_path / "templates/pod.yaml").write_text("""
{{- $exporter := index .Subcharts "training-exporter" }}
apiVersion: v1
kind: Pod
metadata: {name: mine, labels: {monitoring: training-exporter}}
spec:
  initContainers: {{- include "training-exporter.sidecar" $exporter | nindent 4 }}
  containers:
    - name: trainer
      image: mine
      env: {{- include "training-exporter.trainer.env" $exporter | nindent 8 }}
      volumeMounts: {{- include "training-exporter.trainer.volumeMounts" $exporter | nindent 8 }}
  volumes: {{- include "training-exporter.sidecar.volumes" $exporter | nindent 4 }}
""")
    documents = render_chart("training-exporter.node.enabled=false", folder=tmp_path)
    (pod,) = (document for document in documents if document["kind"] == "Pod")
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    mounted_names = [
        mount["name"]
        for container in pod["spec"]["initContainers"] + pod["spec"]["containers"]
        for mount in container["volumeMounts"]
    ]

    validate_manifest(pod)
    assert set(mounted_names) == volumes
    assert {volume["configMap"]["name"] for volume in pod["spec"]["volumes"] if "configMap" in volume} <= {
        document["metadata"]["name"] for document in documents if document["kind"] == "ConfigMap"
    }


def test_a_native_sidecar_shares_the_feed_with_the_trainer() -> None:
    job = load_yaml(KUBERNETES / "base/training-job/job.yaml")["spec"]["template"]["spec"]
    (sidecar_container,), (trainer,) = job["initContainers"], job["containers"]
    feed = next(variable["value"] for variable in trainer["env"] if variable["name"] == "EXPORTER_FEED_DIR")

    assert sidecar_container["restartPolicy"] == "Always"
    assert f"--feed.dir={feed}" in sidecar_container["args"]
    assert {"name": "feed", "mountPath": feed} in sidecar_container["volumeMounts"]
    assert {"name": "feed", "mountPath": feed} in trainer["volumeMounts"]


def test_the_kubernetes_manifests_contain_every_dashboard() -> None:
    folder = KUBERNETES / "base/dashboards"
    mounted_names = {
        name
        for generator in load_yaml(folder / "kustomization.yaml")["configMapGenerator"]
        for name in generator["files"]
    }

    assert {(folder / name).resolve() for name in mounted_names} == set(
        (PROJECT / "dashboards/json").glob("*.json")
    )
    assert len(build_kustomization(folder)) == len(mounted_names)


def test_rules_are_available_as_a_prometheus_operator_resource() -> None:
    completed_run = run(sys.executable, KUBERNETES / "prometheusrule.py")
    resource = load_documents(completed_run.stdout)[0]

    validate(resource, "PrometheusRule")
    assert sum(len(group["rules"]) for group in resource["spec"]["groups"]) == len(rules())


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
