"""Immutable value classes that are fast to import: only the initializer is generated.

`@dataclass(frozen=True, slots=True)` compiles at least six functions for each class, which took half of the import time of the
exporter in a training job. `@value_class` compiles one function. The type checker refuses assignments to fields, but the interpreter
does not. Public classes are therefore frozen dataclasses.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self, dataclass_transform
else:

    def dataclass_transform(**_: object):  # noqa: ANN201  # typing has it from Python 3.11
        """Return a decorator without effect."""
        return lambda function: function


T = TypeVar("T")


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field,))
def value_class(cls: type[T]) -> type[T]:
    """Add slots and an initializer to a class with annotated fields."""
    return dataclasses.dataclass(slots=True, eq=False, repr=False, match_args=False)(cls)


class Value:
    """Base of value classes and frozen dataclasses: equality, hash and representation by fields, and `replace`."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other):
            return NotImplemented
        return _values(self) == _values(other)

    def __hash__(self) -> int:
        return hash(_values(self))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in _field_names(self))
        return f"{type(self).__name__}({fields})"

    def replace(self, **changes: object) -> Self:
        """Return a copy with changed fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]  # its subclasses are dataclasses


def _field_names(value: Any) -> tuple[str, ...]:
    field_names: tuple[str, ...] = value.__slots__
    return field_names


def _values(value: Any) -> tuple[object, ...]:
    return tuple([getattr(value, name) for name in value.__slots__])
