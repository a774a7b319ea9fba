"""Labels `rule` of refused calls and `reason` of refused samples: the documentation lists all their values."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from places import PROJECT

import exporter
from exporter import training
from exporter.ledger.families.feed import REJECTED
from exporter.recording.conversion import Rejection
from exporter.training.facts import Facts
from exporter.training.metrics import Families

PACKAGE = Path(exporter.__path__[0])
RULE_ARGUMENT = {"report": 1, "misuse": 1, "_report": 0, "_reporting": 0}
"""Position of the argument `rule`, by the name of the function."""


def calls(path: Path, names: set[str]) -> Iterator[ast.Call]:
    """Yield the calls of functions and methods with these names in a source file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in names:
                yield node


def reported_rules() -> tuple[set[str], set[tuple[str, str]]]:
    """Return the constant rules of the source, and the file name and the expression of each computed rule."""
    constants, computed = set(), set()
    for folder in ("training", "one_logger"):
        for path in (PACKAGE / folder).rglob("*.py"):
            for call in calls(path, set(RULE_ARGUMENT)):
                name = getattr(call.func, "attr", getattr(call.func, "id", ""))
                if len(call.args) <= RULE_ARGUMENT[name]:
                    continue  # a method of the same name with fewer arguments
                rule = call.args[RULE_ARGUMENT[name]]
                if isinstance(rule, ast.Constant):
                    constants.add(str(rule.value))
                elif ast.unparse(rule) != "rule":  # such a function passes its own argument
                    computed.add((path.name, ast.unparse(rule)))
    return constants, computed


def tensor_reasons() -> set[str]:
    """Return the reasons for which `TensorReader` refuses a tensor."""
    path = PACKAGE / "recording/tensors.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    statements = [node for node in ast.walk(tree) if isinstance(node, (ast.Return, ast.Assign))]
    expressions = [node.value for node in statements] + [call.args[0] for call in calls(path, {"_refuse"})]
    return {
        node.value for node in expressions if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def arguments(function: object) -> list[str]:
    """Return the names of the arguments of a function, except for `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]  # a function
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]


def documented_rules() -> list[str]:
    """Return the rules in the first cells of the tables in the section *Invalid calls*."""
    text = (PROJECT / "docs/training.md").read_text(encoding="utf-8")
    section = text.split("## Invalid calls\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return [rule for cell in cells if cell != "`rule`" for rule in re.findall(r"`(\w+)`", cell)]


def test_the_guide_lists_every_rule_of_an_invalid_call_once() -> None:
    constants, computed = reported_rules()
    invalid_facts = dict.fromkeys(arguments(training.describe), -1)
    rules_by_expression = {
        ("numbers.py", "field"): set(arguments(training.record)) - {"mode"},
        ("numbers.py", "f'tensor_{reason}'"): {f"tensor_{reason}" for reason in tensor_reasons()},
        ("loop_values.py", "name"): {"train_iterations_target", "train_samples_target"},
        ("state.py", "name"): {name for name, _ in Facts(Families()).describe(invalid_facts)},
    }

    assert computed == set(rules_by_expression)
    assert sorted(documented_rules()) == sorted(constants.union(*rules_by_expression.values()))


def test_the_reference_of_rejected_samples_lists_every_reason() -> None:
    documented_reasons = set(re.findall(r"`(\w+)`", " ".join(REJECTED.details)))

    assert {*(reason.value for reason in Rejection), *tensor_reasons(), "overflow"} == documented_reasons
