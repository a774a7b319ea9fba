"""Upstream test suites of torch and one-logger, run against the compatibility modules.

    python benchmarks/upstream.py CHECKOUT

CHECKOUT is a checkout of PyTorch or of nv-one-logger, because the packages of both do not contain their tests. The upstream tests run
with changed imports and adapted internals. The exit status is 0 if the results are as expected, 1 otherwise, and 2 if the checkout is
neither of the two.

`one-logger-suites.json` lists the tests of one-logger that are expected to fail, by reason: a difference that
`docs/one-logger.md` documents, or a private name of the original.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
PROJECT = BENCHMARKS.parent
ONE_LOGGER = json.loads((BENCHMARKS / "one-logger-suites.json").read_text(encoding="utf-8"))
TORCH_TESTS = {
    "test/test_monitor.py": 6,
    "test/distributed/elastic/metrics/api_test.py": 3,
    "test/distributed/elastic/events/lib_test.py": 7,
}
"""Minimum number of tests that pass, by test file of PyTorch."""
TORCH_MODULES = {"torch.monitor": "exporter.monitor", "torch.distributed.elastic": "exporter.elastic"}
# A stand-in for PyTorch's TestCase, whose module imports packages that only developers of PyTorch install.
TORCH_CONFTEST = """
import sys, types, unittest
common = sys.modules["torch.testing._internal.common_utils"] = types.ModuleType("common_utils")
common.TestCase, common.run_tests = unittest.TestCase, unittest.main
common.skipIfTorchDynamo = lambda _reason: lambda test: test
common.HardwareClassification = types.SimpleNamespace(GENERIC=None)
"""


def run_pytest(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of a folder without this project's configuration of pytest."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            os.devnull,
            "-p",
            "no:cacheprovider",
            *arguments,
            folder,
        ],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": f"{PROJECT}:{BENCHMARKS}", "EXPORTER_FEED_DIR": str(folder / "feed")}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def run_torch_file(checkout: Path, name: str, min_passed: int, folder: Path) -> bool:
    """Run a test file of PyTorch with changed imports, and print the result. Return True if the result is as expected."""
    text = (checkout / name).read_text(encoding="utf-8")
    for original, replacement in TORCH_MODULES.items():
        text = re.sub(rf"{re.escape(original)}(?=[\w.]* import|\.(metrics|events)\.)", replacement, text)
    (folder / "test_upstream.py").write_text(text, encoding="utf-8")
    (folder / "conftest.py").write_text(TORCH_CONFTEST, encoding="utf-8")
    process = run_pytest(folder)
    passed_tests = sum(map(int, re.findall(r"(\d+) passed", process.stdout)))
    has_succeeded = process.returncode == 0 and passed_tests >= min_passed
    print(f"{name}: {passed_tests} passed", "" if has_succeeded else f"\n{process.stdout[-5000:]}")
    return has_succeeded


def run_one_logger_suite(checkout: Path, suite: str, folder: Path) -> bool:
    """Run a suite of one-logger, and print the tests with an unexpected result. Return True if there are none."""
    expectations = ONE_LOGGER["suites"][suite]
    shutil.copytree(checkout / expectations["folder"], folder / "tests")
    outcome = folder / "outcome.json"
    process = run_pytest(
        folder / "tests",
        *("--rootdir", str(folder / "tests"), "-p", "one_logger_suite_plugin", "--timeout=60"),
        *("-o", "python_files=test_*.py integration_test.py"),
        *(f"--ignore-glob=*/{name}" for name in expectations["excluded"]),
        SUITE_OUTCOME=str(outcome),
    )
    if not outcome.exists():
        print(f"{suite}: the suite did not finish\n{process.stdout[-5000:]}{process.stderr[-5000:]}")
        return False
    results = json.loads(outcome.read_text(encoding="utf-8"))
    failed_tests = {name.removeprefix(expectations["prefix"]) for name in results["failed"]}
    expected = {name for names in expectations["fail"].values() for name in names}
    total = len(results["passed"]) + len(failed_tests)
    print(f"{suite}: {len(results['passed'])} of {total} tests passed ({expectations['tests']} expected)")
    for name in sorted(failed_tests - expected):
        print(f"  failed unexpectedly: {name}")
    for name in sorted(expected - failed_tests):
        print(f"  passed unexpectedly: {name}")
    return (
        failed_tests == expected
        and total == expectations["tests"]
        and len(results["passed"]) >= expectations["min_passed"]
    )


def main(arguments: list[str]) -> int:
    """Run the suites of a checkout. Return the exit status."""
    checkout = Path(arguments[0] if arguments else "").resolve()
    results = []
    if all((checkout / name).is_file() for name in TORCH_TESTS):
        for name, min_passed in TORCH_TESTS.items():
            with tempfile.TemporaryDirectory() as folder:
                results.append(run_torch_file(checkout, name, min_passed, Path(folder)))
    elif (checkout / "nv_one_logger").is_dir():
        for suite in ONE_LOGGER["suites"]:
            with tempfile.TemporaryDirectory() as folder:
                results.append(run_one_logger_suite(checkout, suite, Path(folder)))
    else:
        print(
            f"{checkout} is not a checkout of PyTorch or nv-one-logger; run make upstream CHECKOUT=DIR after "
            f"git clone https://github.com/pytorch/pytorch or git clone {ONE_LOGGER['repository']} "
            f"(tested with commit {ONE_LOGGER['commit']})",
            file=sys.stderr,
        )
        return 2
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
