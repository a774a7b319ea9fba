"""Validators and schemas of deploy/, for the tests of its files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # the package has no types
import pytest
import yaml
from places import PROJECT
from rules_support import load_yaml
from run_support import child_environment, run_to_completion

DEPLOY = PROJECT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SCHEMAS = load_yaml(PROJECT / "tests/data/deploy/schemas.yaml")
DOCKERFILE = (DEPLOY / "docker/Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
"""Dockerfile with each instruction on a line."""
BIN = Path(sys.executable).parent


def require_program(name: str, package: str) -> str:
    """Return the path of a validator. Without the validator, skip the test and name the package to install; on CI, fail."""
    executable = shutil.which(name, path=str(BIN)) or shutil.which(name)
    if executable is None:
        stop = pytest.fail if os.environ.get("CI") else pytest.skip
        stop(f"install {package} for {name}")
    return executable


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_to_completion([str(argument) for argument in command], env=child_environment(**variables))


def load_documents(text: str) -> list[Any]:
    """Return the documents of a YAML text. The C parser takes a tenth of the time of the Python parser."""
    return list(yaml.load_all(text, Loader=yaml.CSafeLoader))


def validate(document: Any, schema_name: str) -> None:
    """Validate a document against the local schema, in which an unused key is an error."""
    jsonschema.validate(document, SCHEMAS[schema_name])
