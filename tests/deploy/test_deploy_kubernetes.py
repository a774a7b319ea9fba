"""Validity and consistency of the Kubernetes manifests and the Helm chart of deploy/, as far as possible without a cluster."""

from __future__ import annotations

import base64
import gzip
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deploy_support import DEPLOY, KUBERNETES, load_documents, require_program, run, validate
from places import PROJECT
from rules_support import load_yaml, rules
from run_support import child_environment

from exporter.cli.main import main

CHART = DEPLOY / "helm/training-exporter"
OVERLAYS = sorted(
    path.parent for path in KUBERNETES.rglob("kustomization.yaml") if path.parent.name != "dashboards"
)
KUBERNETES_VERSION = "1.34"
"""Version of Kubernetes whose schemas validate the manifests: the first with resource.k8s.io/v1, which an overlay uses."""


def build_kustomization(folder: Path) -> list[dict[str, Any]]:
    kubectl = require_program("kubectl", "the extra `test`")
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


def render_manifest(*values: str, folder: Path = CHART, operator: bool = True) -> str:
    """Return the text that Helm renders with these values, for a cluster with or without Prometheus' operator."""
    helm = require_program("helm", "the extra `test`")
    crds = ["--api-versions", "monitoring.coreos.com/v1"] if operator else []
    settings = [argument for setting in values for argument in ("--set", setting)]
    completed_run = run(helm, "template", "release", folder, *crds, *settings)
    assert completed_run.returncode == 0, completed_run.stderr
    return completed_run.stdout


def render_chart(*values: str, folder: Path = CHART, operator: bool = True) -> list[dict[str, Any]]:
    """Return the documents of `render_manifest`."""
    manifest = render_manifest(*values, folder=folder, operator=operator)
    return [document for document in load_documents(manifest) if document]


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


MAX_OBJECT_BYTES = 1_048_576
"""Limit of the API server for the data of a ConfigMap or Secret."""


def release_bytes(manifest: str) -> int:
    """Return the size of the Secret in which Helm stores a release: chart files in base64 and the manifest, compressed, in base64."""
    chart_files = [
        {"name": path.name, "data": base64.b64encode(path.read_bytes()).decode()}
        for folder in ("templates", "dashboards", "rules")
        for path in (CHART / folder).iterdir()
    ]
    release = json.dumps({"chart": {"files": chart_files}, "manifest": manifest})
    return len(base64.b64encode(gzip.compress(release.encode())))


def test_each_dashboard_and_the_release_fit_into_an_object_of_the_api_server() -> None:
    manifest = render_manifest()
    dashboards = {
        document["metadata"]["name"]: sum(len(content.encode()) for content in document["data"].values())
        for document in load_documents(manifest)
        if document and "-dashboard-" in document["metadata"]["name"]
    }

    assert len(dashboards) == 6
    assert {name: size for name, size in dashboards.items() if size > 0.9 * MAX_OBJECT_BYTES} == {}
    assert release_bytes(manifest) < 0.95 * MAX_OBJECT_BYTES


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
