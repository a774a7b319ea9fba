"""Launch of two torchrun agents without a run name, each under `run` with a separate sidecar, as on two nodes."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from bridges_support import needs
from fork_server import forked_interpreter
from places import TESTS
from program_support import series, sum_by_labels
from run_support import (
    child_environment,
    fetch_page,
    free_port,
    run_command,
    run_to_completion,
    running_process,
)
from waiting import wait_until

pytestmark = [needs("torch"), pytest.mark.timeout(300)]

STEPS = 30


def agent_command(node: int, rendezvous_options: list[str], script: Path) -> list[str]:
    launcher = [
        forked_interpreter("torch"),
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        f"--node-rank={node}",
    ]
    return [*launcher, "--nproc-per-node=1", *rendezvous_options, str(script)]


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_agents_with_one_rendezvous_are_one_run_on_the_pages_of_both_nodes(
    tmp_path: Path, backend: str
) -> None:
    script, rendezvous_port = tmp_path / "train.py", free_port()
    call = f"train_until_the_pages_are_read({str(tmp_path)!r}, {STEPS})"
    script.write_text(f"from programs.training import train_until_the_pages_are_read\n{call}\n")
    static_options = ["--master-addr=127.0.0.1", f"--master-port={rendezvous_port}"]
    c10d_options = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{rendezvous_port}"]
    rendezvous_options = static_options if backend == "static" else c10d_options
    feeds, ports = [tmp_path / "feed0", tmp_path / "feed1"], [free_port(), free_port()]
    log_files = [tmp_path / "stderr0", tmp_path / "stderr1"]
    environment = child_environment(OMP_NUM_THREADS="1")
    environment["PYTHONPATH"] += f":{TESTS}"
    with ExitStack() as stack:
        for node, (feed, port, path) in enumerate(zip(feeds, ports, log_files, strict=True)):
            job = agent_command(node, rendezvous_options, script)
            stderr = stack.enter_context(path.open("w"))
            command = run_command(feed, job, f"--state.dir={tmp_path / f'state{node}'}", port=port)
            stack.enter_context(running_process(command, feed, stderr=stderr, env=environment))
        wait_until((tmp_path / "rank0").exists)
        wait_until((tmp_path / "rank1").exists)
        ports_by_rank = [wait_until(partial(port_of_rank, rank, ports)) for rank in (0, 1)]
        wait_until(lambda: "training_run_state{" in fetch_page(ports_by_rank[0]))
        pages = [fetch_page(port) for port in ports_by_rank]
        (tmp_path / "pages-read").touch()

    logged_names = {re.search(r"exporter: run (\S+?),", path.read_text()).group(1) for path in log_files}  # type: ignore[union-attr]  # None fails the test
    published_names = {
        name for page in pages for name in re.findall(r'^training_\w+\{.*\brun="([^"]+)"', page, re.MULTILINE)
    }
    rank_record = json.loads((tmp_path / "rank0").read_text())
    assert len(logged_names) == 1
    assert published_names == logged_names
    assert all("share the run name above" in path.read_text() for path in log_files)
    assert sum_by_labels(pages[0], "training_steps_total", mode="train") == rank_record["steps"] == STEPS
    assert sum_by_labels(pages[0], "training_loss", mode="train") == pytest.approx(
        rank_record["loss"], rel=1e-5
    )
    assert sum_by_labels(pages[0], "training_run_state", state="running") == 1
    assert series(pages[1], "training_run_state") == {}  # published once, beside rank 0


def port_of_rank(rank: int, ports: list[int]) -> int | None:
    """Return the port of the sidecar whose page has all steps of a rank, or None."""
    steps = {
        port: sum_by_labels(fetch_page(port), "training_steps_total", rank=str(rank), mode="train")
        for port in ports
    }
    return next((port for port in ports if steps[port] == STEPS), None)


def test_a_launch_of_several_nodes_without_a_rendezvous_address_logs_that_a_name_is_needed(
    tmp_path: Path,
) -> None:
    mpi_environment = child_environment(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1")
    unnamed_result = run_to_completion(run_command(tmp_path, ["sleep", "0"]), env=mpi_environment)
    named_result = run_to_completion(
        run_command(tmp_path, ["sleep", "0"], "--run.name=r"), env=mpi_environment
    )

    assert "set the same --run.name on all nodes" in unnamed_result.stderr
    assert "--run.name" not in named_result.stderr
