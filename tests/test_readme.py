"""The README does what it says: its programs run as they stand, its links lead somewhere, its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from bridges_support import QUIET, job, wanted
from elastic_support import REPOSITORY

pytestmark = pytest.mark.timeout(180)

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PROGRAMS: list[str] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def program(word: str) -> str:
    """The one program of the README that has this word."""
    found = [each for each in PROGRAMS if word in each]
    assert len(found) == 1
    return found[0]


def test_every_program_is_one_that_a_test_runs() -> None:
    words = ("optimizer.step()", "from exporter import Stat")

    assert sorted(PROGRAMS) == sorted(program(word) for word in words)


@wanted("torch")
def test_the_plain_loop_tells_its_steps_and_samples(tmp_path: Path) -> None:
    told = job(tmp_path, program("optimizer.step()"), QUIET)

    assert told.value("training_steps_total", mode="train") == 100
    assert told.value("training_samples_total", mode="train") == 3200


def test_the_statistics_are_recorded(tmp_path: Path) -> None:
    told = job(tmp_path, program("from exporter import Stat"), QUIET)

    assert told.value("train_reward_count") == 600
    assert told.value("training_events_total", type="rollout.done") == 1


@pytest.mark.parametrize(
    "path",
    [
        "README.md",
        "ARCHITECTURE.md",
        *sorted(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md")),
    ],
)
def test_links_to_files_lead_to_files(path: str) -> None:
    text = (REPOSITORY / path).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    local = [link for link in links if "://" not in link]

    assert [link for link in local if not (REPOSITORY / path).parent.joinpath(link).exists()] == []


def test_its_make_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = {
        word for line in re.findall(r"^make (\w+(?: \w+)*)", README, re.MULTILINE) for word in line.split()
    }

    assert targets
    assert {target for target in targets if f"\n{target}:" not in makefile} == set()


def test_the_benchmarks_that_it_names_exist() -> None:
    named = set(re.findall(r"benchmarks/\w+\.py", README))

    assert named
    assert {name for name in named if not (REPOSITORY / name).exists()} == set()


def test_its_figures_are_those_of_the_benchmarks() -> None:
    done = subprocess.run(
        [sys.executable, REPOSITORY / "benchmarks/page.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout
