"""Runs foreign jobs unnamed and unchanged under `training-exporter run`, and compares /metrics with the log of the job.

Each job of `benchmarks/foreign` keeps a log of its steps. A job whose framework is not installed here receives a virtual
environment. Prints a table; a number that is neither the job's nor absent for a declared reason is printed as wrong, and
the exit status is then 1.

    python benchmarks/foreign_jobs.py [--venvs=DIRECTORY] [NAME...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from foreign_run import SOURCES, ForeignJob, JobResult, measure

TORCH = "torch==2.13.0"
TORCHRUN = ("{python}", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
NO_CHECKPOINT = "the job writes none"


def script(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of a job that is a Python script."""
    return ("{python}", f"{SOURCES}/{name}.py", *arguments)


NOTHING_RECORDED = "no optimizer or loader of torch: `run` prints the lines that record the steps"
NOT_INSTRUMENTED = dict.fromkeys(
    ("state", "steps", "loss", "samples", "epochs", "checkpoints", "productive", "interruptions"),
    NOTHING_RECORDED,
)
NO_EPOCHS = {"epochs": "the job has no epochs", "checkpoints": NO_CHECKPOINT}
LEARNING_TRL = (TORCH, "trl", "datasets")
MOSAICML = (
    "torchvision",
    "torchmetrics",
    "torch_optimizer",
    "coolname",
    "tabulate",
    "py-cpuinfo",
    "mosaicml-cli",
)

JOBS = (
    ForeignJob(name="amp_accumulation", command=script("amp_accumulation")),
    ForeignJob(name="failing", command=script("amp_accumulation", "3"), status=3),
    ForeignJob(name="ddp", command=(*TORCHRUN, f"{SOURCES}/ddp.py")),
    ForeignJob(
        name="elastic",
        command=(*TORCHRUN, "--max-restarts=1", f"{SOURCES}/elastic.py"),
        absent={"epochs": "the job has no loader", "samples": "the job has no loader"},
    ),
    ForeignJob(name="fabric", command=script("fabric"), packages=("lightning",)),
    ForeignJob(
        name="deepspeed",
        command=("deepspeed", "--num_gpus=1", f"{SOURCES}/deepspeed_zero.py"),
        packages=("deepspeed",),
    ),
    ForeignJob(name="ignite", command=script("ignite_supervised"), packages=("pytorch-ignite",)),
    ForeignJob(
        name="keras",
        command=script("keras_fit"),
        packages=("keras",),
        absent={"samples": "Keras passes no batch to callbacks"},
    ),
    *(
        ForeignJob(
            name=f"trl_{trainer}",
            command=script(f"trl_{trainer}"),
            packages=("trl", "transformers"),
            venv="trl",
            requirements=LEARNING_TRL,
        )
        for trainer in ("sft", "dpo", "grpo")
    ),
    ForeignJob(
        name="composer",
        command=script("composer_trainer"),
        packages=("mosaicml",),
        venv="composer",
        requirements=(TORCH, *MOSAICML),
        without_dependencies=("mosaicml",),
        absent={"epochs": "Composer leaves its loader before the end"},
    ),
    ForeignJob(
        name="ray",
        command=script("ray_train"),
        packages=("ray",),
        venv="ray",
        requirements=(TORCH, "ray[train]"),
        absent={"checkpoints": NO_CHECKPOINT},
    ),
    ForeignJob(
        name="fastai",
        command=script("fastai_learner"),
        packages=("fastai",),
        venv="fastai",
        requirements=(TORCH, "fastai"),
    ),
    ForeignJob(
        name="jax",
        command=script("jax_flax"),
        packages=("jax", "flax"),
        venv="jax",
        requirements=("jax", "flax", "optax"),
        absent=NOT_INSTRUMENTED,
    ),
    ForeignJob(
        name="jax_instrumented",
        command=script("jax_flax", "instrumented"),
        packages=("jax", "flax"),
        venv="jax",
        requirements=("jax", "flax", "optax"),
        absent=NO_EPOCHS,
    ),
    ForeignJob(
        name="xgboost",
        command=script("xgboost_rounds"),
        packages=("xgboost-cpu",),
        venv="xgboost",
        requirements=("xgboost-cpu", "scikit-learn"),
        absent=NOT_INSTRUMENTED,
    ),
    ForeignJob(
        name="xgboost_instrumented",
        command=script("xgboost_rounds", "instrumented"),
        packages=("xgboost-cpu",),
        venv="xgboost",
        requirements=("xgboost-cpu", "scikit-learn"),
        absent=NO_EPOCHS,
    ),
    ForeignJob(
        name="hydra",
        command=script("hydra_sweep", "-m", "+lr=0.1,0.01", "hydra.sweep.dir=."),
        packages=("hydra-core",),
        venv="hydra",
        requirements=(TORCH, "hydra-core", "papermill", "ipykernel", "nbformat"),
        absent={"checkpoints": NO_CHECKPOINT},
    ),
    ForeignJob(
        name="two_pythons",
        command=(
            "bash",
            "-c",
            f"{{python}} {SOURCES}/prepare.py && {{python}} {SOURCES}/amp_accumulation.py",
        ),
    ),
    ForeignJob(
        name="notebook",
        command=(
            "bash",
            "-c",
            f"{{python}} {SOURCES}/notebook.py {SOURCES} in.ipynb && {{python}} -m papermill in.ipynb out.ipynb",
        ),
        packages=("papermill", "ipykernel"),
        venv="hydra",
        requirements=(TORCH, "hydra-core", "papermill", "ipykernel", "nbformat"),
        absent={"checkpoints": NO_CHECKPOINT},
    ),
)


def interpreter(job: ForeignJob, venvs: Path) -> str:
    """Return the interpreter of a job; creates its virtual environment at the first call."""
    if not job.venv:
        return sys.executable
    python = venvs / job.venv / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venvs / job.venv)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *job.requirements], check=True)
        if job.without_dependencies:
            subprocess.run([*pip, "--no-deps", *job.without_dependencies], check=True)
    return str(python)


def versions(job: ForeignJob, python: str) -> str:
    """Return the names and versions of a job's packages."""
    look = (
        "import sys, importlib.metadata as m; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"
    )
    process = subprocess.run([python, "-c", look, *job.packages], capture_output=True, text=True, check=False)
    return process.stdout.strip()


def table_row(result: JobResult, version: str) -> str:
    """Return a row of the table."""
    verdicts = result.verdicts()
    cells = [result.job.name, version]
    for outcome in ("exact", "absent", "wrong"):
        names = [name for name, verdict in verdicts.items() if verdict.startswith(outcome)]
        details = [f"{name} ({verdicts[name][7:]})" if outcome == "wrong" else name for name in names]
        cells.append(", ".join(details) or "none")
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Run the named jobs, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venvs", type=Path, default=Path(tempfile.gettempdir()) / "foreign-jobs")
    parser.add_argument("--pages", type=Path, help="directory for the last page of each job")
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    print("| job | versions | exact | absent | wrong |\n|---|---|---|---|---|", flush=True)
    has_failed = False
    for job in JOBS:
        if arguments.names and job.name not in arguments.names:
            continue
        try:
            python = interpreter(job, arguments.venvs)
            with tempfile.TemporaryDirectory() as directory:
                result = measure(job, python, Path(directory))
        except (OSError, subprocess.SubprocessError) as error:
            print(f"{job.name} could not run: {error}", flush=True)
            has_failed = True
            continue
        if arguments.pages is not None:
            report = f"{result.page}\n{result.output}\n{result.log_numbers}\n{result.page_numbers}\n{result.states}"
            (arguments.pages / f"{job.name}.txt").write_text(report)
        print(table_row(result, versions(job, python)), flush=True)
        has_failed = has_failed or any(verdict.startswith("wrong") for verdict in result.verdicts().values())
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
