"""README: programs run, and make targets and benchmarks exist. Links of all documents resolve."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from bridges_support import run_job
from places import PROJECT
from program_support import run_program

pytestmark = pytest.mark.timeout(180)

README = (PROJECT / "README.md").read_text(encoding="utf-8")
PROGRAMS: list[str] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def program_with(phrase: str) -> str:
    """Return the only program of the README that contains a phrase."""
    matches = [program for program in PROGRAMS if phrase in program]
    assert len(matches) == 1
    return matches[0]


def test_every_program_of_the_readme_is_run_by_a_test() -> None:
    phrases = ("optimizer.step()", "from exporter import Stat")

    assert sorted(PROGRAMS) == sorted(program_with(phrase) for phrase in phrases)


def test_the_plain_loop_is_the_tested_example() -> None:
    assert program_with("optimizer.step()") == (PROJECT / "docs/examples/plain.py").read_text(
        encoding="utf-8"
    )


def test_the_statistics_example_records_its_samples_and_events(tmp_path: Path) -> None:
    result = run_job(tmp_path, program_with("from exporter import Stat"))

    assert result.value("train_reward_count") == 600
    assert result.value("training_events_total", type="rollout.done") == 1


WINDOWS_PROGRAM = """
import os, sys
sys.platform = "win32"
for name in ("uname", "register_at_fork", "fork", "getuid", "sched_getaffinity", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"):
    delattr(os, name)
sys.modules |= dict.fromkeys(["fcntl", "resource", "pwd"])  # None makes the import fail
import exporter
from exporter import elastic, monitor, one_logger, training
from exporter.recording.handlers import ConsoleHandler
exporter.configure(run="r", rank=0)
step_time = exporter.Stat("train.step", ["mean"])
step_time.add(0.5)
exporter.log("saved", "a message", steps=1)
with training.training_loop(train_iterations_start=0), training.training_iteration():
    training.record(loss=0.5)
print(exporter.flush())
"""


def test_on_another_system_a_job_records_and_a_notice_says_that_nothing_is_exported(
    tmp_path: Path,
) -> None:
    completed = run_program(tmp_path / "feed", WINDOWS_PROGRAM)

    assert completed.stdout == "False\n"
    assert "the feed needs Linux" in completed.stderr
    assert list((tmp_path / "feed").iterdir()) == []


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub creates for the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "path",
    [
        *("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "deploy/README.md"),
        *sorted(f"docs/{path.name}" for path in (PROJECT / "docs").glob("*.md")),
    ],
)
def test_links_of_a_document_resolve(path: str) -> None:
    document = PROJECT / path
    links = re.findall(r"\]\((?!\w+://)([^)#\s]*)(?:#([^)\s]*))?\)", document.read_text(encoding="utf-8"))
    targets = [(document.parent / name if name else document, anchor) for name, anchor in links]

    assert [str(target) for target, _ in targets if not target.exists()] == []
    assert [(target, anchor) for target, anchor in targets if anchor and anchor not in anchors(target)] == []


def test_make_targets_and_benchmarks_of_the_readme_exist() -> None:
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    targets = " ".join(re.findall(r"^make (\w+(?: \w+)*)", README, re.MULTILINE)).split()
    benchmarks = re.findall(r"benchmarks/\w+\.py", README)

    assert targets
    assert benchmarks
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
    assert [benchmark for benchmark in benchmarks if not (PROJECT / benchmark).exists()] == []


def test_the_figures_of_the_readme_come_from_the_results_file() -> None:
    completed = subprocess.run(
        [sys.executable, PROJECT / "benchmarks/page.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert completed.returncode == 0, completed.stdout
