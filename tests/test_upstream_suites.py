"""torch's own tests of torch.monitor and of torchelastic's metrics and events pass with only their imports changed.

They need a checkout of its repository, since no package of a registry carries them (`TORCH_CHECKOUT`). What they fix is
said in words of our own in `monitor/test_monitor.py` and `elastic/`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import places
import pytest

CHECKOUT = os.environ.get("TORCH_CHECKOUT")
FILES = {
    "test/test_monitor.py": 6,
    "test/distributed/elastic/metrics/api_test.py": 3,
    "test/distributed/elastic/events/lib_test.py": 7,
}
"""A file of theirs → the tests that it has at the least."""
FOLDERS = {"torch.monitor": "exporter.monitor", "torch.distributed.elastic": "exporter.elastic"}
# Their own test case compares tensors, and needs packages for it.
COMMON = """
import sys, types, unittest
common = sys.modules["torch.testing._internal.common_utils"] = types.ModuleType("common_utils")
common.TestCase, common.run_tests = unittest.TestCase, unittest.main
common.skipIfTorchDynamo = lambda _reason: lambda test: test
common.HardwareClassification = types.SimpleNamespace(GENERIC=None)
"""


@pytest.mark.skipif(
    CHECKOUT is None, reason="no TORCH_CHECKOUT: git clone https://github.com/pytorch/pytorch"
)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FILES)
def test_torchs_own_tests_pass_with_their_imports_changed(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch")
    text = (Path(CHECKOUT or "") / name).read_text(encoding="utf-8")
    for theirs, ours in FOLDERS.items():
        text = re.sub(rf"{re.escape(theirs)}(?=[\w.]* import|\.(metrics|events)\.)", ours, text)
    (tmp_path / "test_theirs.py").write_text(text, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(COMMON, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(places.PROJECT), "EXPORTER_FEED_DIR": str(tmp_path / "feed")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-5000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= FILES[name]
