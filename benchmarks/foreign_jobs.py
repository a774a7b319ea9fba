"""Foreign jobs under `training-exporter run`, without changes and without a run name: /metrics compared with the log of the job.

Each job of `benchmarks/foreign` keeps a log of its steps. A job whose framework the tests do not install receives a virtual
environment. Prints a table of the quantities that are equal, within their tolerance (the last loss 0.01 %, the productive time
35 %), absent for a declared reason, or wrong. Steps, samples and epochs are those of rank 0. The exit status is 1 if a quantity
is wrong or a job could not run.

    python benchmarks/foreign_jobs.py [--venvs=DIRECTORY] [--pages=DIRECTORY] [NAME...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from foreign_run import SOURCES, ForeignJob, JobResult, Verdict, measure

TORCH = "torch==2.13.0"
TORCHRUN = ("{python}", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
NO_CHECKPOINT = "the job writes no checkpoint"


def script(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of a job that is a Python script."""
    return ("{python}", f"{SOURCES}/{name}.py", *arguments)


NOTHING_RECORDED = "the job does not use torch; `run` prints the lines that record the steps"
NOT_INSTRUMENTED = dict.fromkeys(
    ("state", "steps", "loss", "samples", "epochs", "checkpoints", "productive", "interruptions"),
    NOTHING_RECORDED,
)
NO_EPOCHS = {"epochs": "the job has no epochs", "checkpoints": NO_CHECKPOINT}
TRL = (TORCH, "trl", "datasets")
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
            requirements=TRL,
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
        absent={"epochs": "Composer does not exhaust its loader"},
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
    """Return the path of the interpreter of a job. Its virtual environment is created at the first call."""
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
    program = (
        "import sys, importlib.metadata as m; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"
    )
    process = subprocess.run(
        [python, "-c", program, *job.packages], capture_output=True, text=True, check=False
    )
    return process.stdout.strip()


def table_row(result: JobResult, package_versions: str) -> str:
    """Return a row of the table: for each verdict, the names of the quantities."""
    comparisons = result.comparisons()
    cells = [result.job.name, package_versions]
    for verdict in Verdict:
        names = [
            f"{name} ({comparison.difference})" if verdict is Verdict.WRONG else name
            for name, comparison in comparisons.items()
            if comparison.verdict is verdict
        ]
        cells.append(", ".join(names) or "none")
    return f"| {' | '.join(cells)} |"


def report(result: JobResult) -> str:
    """Return the last page, the output and the numbers of a job, for an inspection of wrong quantities."""
    return f"{result.page}\n{result.output}\n{result.log_numbers}\n{result.page_numbers}\n{result.states}"


def main() -> int:
    """Run the named jobs, or all jobs, and print the table. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    venvs = Path(tempfile.gettempdir()) / "foreign-jobs"
    parser.add_argument("--venvs", type=Path, default=venvs, help=f"virtual environments (default {venvs})")
    parser.add_argument("--pages", type=Path, help="directory for the last page and the output of each job")
    parser.add_argument("names", nargs="*", metavar="NAME", help="job; default: all jobs")
    arguments = parser.parse_args()
    headings = ("job", "versions", *(verdict.value for verdict in Verdict))
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}", flush=True)
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
            (arguments.pages / f"{job.name}.txt").write_text(report(result))
        print(table_row(result, versions(job, python)), flush=True)
        verdicts = {comparison.verdict for comparison in result.comparisons().values()}
        has_failed = has_failed or Verdict.WRONG in verdicts
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
