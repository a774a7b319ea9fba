"""Job commands: the script, the id of the rendezvous, and the name that the agents of a launch share."""

from __future__ import annotations

import pytest

from exporter.cli.command_line import JobCommand, parse_job_command
from exporter.cli.run import make_plan


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("python train.py", "train.py"),
        ("python train.py -m resnet50", "train.py"),
        ("python hydra_app.py -m +lr=0.1,0.01", "hydra_app.py"),
        ("python -u -X dev -m package.train --lr 1", "train"),
        ("python -mpackage.train --lr 1", "train"),
        ("python -uX dev train.py", "train.py"),
        ("python -Bm package.train", "train"),
        ("python -mtorch.distributed.run --nproc-per-node 2 train.py", "train.py"),
        ("python -u /usr/bin/torchrun --nproc-per-node 2 train.py", "train.py"),
        ("torchrun --nproc-per-node 2 -m package.train -m other", "train"),
        ("python -m torch.distributed.run --nproc_per_node=2 train.py -m x", "train.py"),
        ("accelerate launch --num_processes 2 train.py", "train.py"),
        ("bash train.sh -m x", "train.sh"),
        ("srun -m block python train.py", "train.py"),
        ("python program -m x", "program"),
        ("./train --flag", "./train"),
        ("python -c pass", "python"),
    ],
)
def test_the_script_is_found_and_its_arguments_are_not_parsed(command: str, script: str) -> None:
    assert parse_job_command(command.split(), {}).script == script


@pytest.mark.parametrize("option", ["--rdzv-id=job7", "--rdzv_id job7", "--rdzv-id job7"])
def test_the_run_id_of_the_rendezvous_is_read(option: str) -> None:
    for launcher in ("torchrun", "python -m torch.distributed.run", "python -umtorch.distributed.run"):
        command = f"{launcher} {option} --rdzv-backend=c10d train.py --rdzv-id=other".split()

        assert parse_job_command(command, {}) == JobCommand("train.py", run_id="job7")


@pytest.mark.parametrize(
    "command_of_node",
    [
        "torchrun --nnodes=2 --node-rank=%d --master-addr=n1 --master-port 29500 train.py",
        "torchrun --nnodes 1:2 --rdzv-backend=c10d --rdzv-endpoint=n1:29400 --node-rank=%d train.py",
        "accelerate launch --num_machines 2 --machine_rank %d --main_process_ip n1 train.py",
    ],
)
def test_the_agents_of_a_launch_on_several_nodes_derive_the_same_name(command_of_node: str) -> None:
    names = {parse_job_command((command_of_node % node).split(), {}).shared_name for node in (0, 1)}

    assert len(names) == 1
    assert names.pop().startswith("train-")


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        ("torchrun train.py", {"PET_NNODES": "2", "PET_MASTER_ADDR": "n1", "PET_MASTER_PORT": "29500"}),
        ("bash train.sh", {"PET_NNODES": "1:2", "PET_RDZV_ENDPOINT": "n1:29400"}),
        ("python train.py", {"WORLD_SIZE": "16", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}),
    ],
)
def test_the_rendezvous_in_the_environment_names_the_run(command: str, environment: dict[str, str]) -> None:
    plan = make_plan(command.split(), environment)

    assert plan.run == parse_job_command(command.split(), environment).shared_name != ""
    assert plan.is_shared
    assert plan.has_shared_name


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        ("torchrun --nnodes=2 train.py", {}),
        ("mpirun -n 4 python train.py", {"OMPI_COMM_WORLD_SIZE": "4"}),
    ],
)
def test_a_shared_launch_without_a_rendezvous_is_recognized(
    command: str, environment: dict[str, str]
) -> None:
    plan = make_plan(command.split(), environment)

    assert (plan.is_shared, plan.has_shared_name) == (True, False)


def test_a_world_size_of_the_environment_does_not_apply_to_an_agent_of_one_node() -> None:
    assert not make_plan(["torchrun", "train.py"], {"WORLD_SIZE": "4", "MASTER_ADDR": "n1"}).is_shared


@pytest.mark.parametrize(
    ("environment", "run"), [({}, "job7"), ({"SLURM_JOB_ID": "81"}, "81"), ({"EXPORTER_RUN": "mine"}, "mine")]
)
def test_run_announces_the_name_that_the_workers_record(environment: dict[str, str], run: str) -> None:
    assert make_plan(["torchrun", "--rdzv-id=job7", "train.py"], environment).run == run


def test_a_launch_on_one_node_has_no_shared_name() -> None:
    command = ["torchrun", "--nnodes=1", "--master-addr=n1", "train.py"]

    assert parse_job_command(command, {}).shared_name == ""
