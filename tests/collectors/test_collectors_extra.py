"""Third-party collectors in the sidecar, and the exporter's collectors in a registry: the examples of docs/collectors.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml
from places import PROJECT
from prometheus_client.parser import text_string_to_metric_families
from serve_support import sidecar
from waiting import wait_until

DOCUMENT = (PROJECT / "docs/collectors.md").read_text(encoding="utf-8")
EXAMPLES = PROJECT / "docs/examples"
QUEUE_CLASS = "queue_collector:QueueCollector"
SUCCESS_SERIES = 'exporter_collector_success{collector="%s"}'


def create_queue(tmp_path: Path, jobs: int) -> Path:
    """Create the directory of a queue with a file for each job."""
    queue = tmp_path / "night"
    queue.mkdir()
    for index in range(jobs):
        (queue / str(index)).touch()
    return queue


def test_the_document_contains_the_tested_examples() -> None:
    example_files = (EXAMPLES / "queue_collector.py").read_text() + (EXAMPLES / "own_registry.py").read_text()
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)

    assert len(examples) == 2
    assert all(example in example_files for example in examples)


def test_a_configured_collector_class_runs_beside_the_built_in_ones(tmp_path: Path) -> None:
    (yaml_example,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
    settings = yaml.safe_load(yaml_example)
    settings["collectors"]["extra"]["classes"] += ["nowhere:Nothing"]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    queue = create_queue(tmp_path, jobs=3)
    with sidecar(
        tmp_path, f"--config.file={file}", PYTHONPATH=f"{EXAMPLES}:{PROJECT}", QUEUE_DIR=str(queue)
    ) as running:
        wait_until(lambda: running.sample(SUCCESS_SERIES % "nowhere:Nothing") is not None)
        wait_until(lambda: running.sample(SUCCESS_SERIES % QUEUE_CLASS) is not None)
        jobs = running.sample('queue_jobs{queue="night"}')
        successes = [
            running.sample(SUCCESS_SERIES % name) for name in (QUEUE_CLASS, "nowhere:Nothing", "cpu")
        ]
        log = running.log

    assert jobs == 3
    assert successes == [1, 0, 1]
    assert "No module named 'nowhere'" in log


def test_a_package_offers_its_collectors_by_an_entry_point(tmp_path: Path) -> None:
    distribution = tmp_path / "site/queue_collector-1.0.dist-info"
    distribution.mkdir(parents=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: queue-collector\nVersion: 1.0\n")
    (entry_point,) = re.findall(r"^queue = \"(.*)\"$", DOCUMENT, re.MULTILINE)
    (distribution / "entry_points.txt").write_text(f"[training_exporter.collectors]\nqueue = {entry_point}\n")
    path = f"{distribution.parent}:{EXAMPLES}:{PROJECT}"
    with sidecar(tmp_path, PYTHONPATH=path, QUEUE_DIR=str(create_queue(tmp_path, jobs=2))) as running:
        wait_until(lambda: running.sample('queue_jobs{queue="night"}') is not None)

        assert running.sample('queue_jobs{queue="night"}') == 2


def test_built_in_collectors_can_be_registered_in_a_registry_of_the_user() -> None:
    output = subprocess.run(
        [sys.executable, EXAMPLES / "own_registry.py"],
        env={"PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = {family.name for family in text_string_to_metric_families(output)}

    assert {"host_memory_total_bytes", "host_swap_in_bytes"} <= names
