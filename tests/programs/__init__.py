"""Programs that tests run in a new interpreter: each public function of the package is a program."""

from __future__ import annotations

from collections.abc import Callable


def code_of(function: Callable[..., None], *arguments: object) -> str:
    """Return the code that runs a function of this package with arguments that have a literal form."""
    call = f"{function.__name__}({', '.join(map(repr, arguments))})"
    return f"from {function.__module__} import {function.__name__}; {call}"
