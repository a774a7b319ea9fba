"""Settings: named fields that are checked where they are stated, and asked for where they are left to a callable.

Used in the training process. What the job states is refused with one clear message, before training begins. What it
leaves to a callable (`…_or_fn`) is asked for on the job's own thread whenever it is needed, never at construction, so it
may become known late; a callable that raises, or gives what cannot be, is counted and logged, the value is then unknown
(None), and nothing escapes. A field that does not exist is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar, overload

from exporter.errors import OneLoggerError
from exporter.training.reports import report
from exporter.training.types import plain_value, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

REQUIRED: Any = object()


class Field(Generic[T]):
    """A field: checked when it is set, read as it was set.

    Attributes:
        check: Gives the value in its own type, or raises `OneLoggerError` saying what it may be.
        default: Where none is given; `REQUIRED` where one must be.
    """

    def __init__(self, check: Callable[[Any], T], default: Any = REQUIRED) -> None:
        self.check = check
        self.default = default
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: Settings, owner: type) -> T: ...
    def __get__(self, instance: Settings | None, owner: type) -> Self | T:
        if instance is None:
            return self
        if isinstance(self.default, Settings):  # each configuration's own, since it may be changed
            instance.given.setdefault(self.name, self.default.model_copy())
        found: T = instance.given.get(self.name, self.default)
        return found

    def __set__(self, instance: Settings, value: object) -> None:
        instance.given[self.name] = self.accepted(value, type(instance).__name__)

    def accepted(self, value: object, owner: str) -> Any:
        """Check a value that was stated."""
        if value is None and self.default is None:
            return None
        try:
            return self.check(value)
        except OneLoggerError as problem:
            raise OneLoggerError(f"{owner}.{self.name}: {problem}, not {shown(value)}") from None


class Varying(Field["T | Callable[[], T]"], Generic[T]):
    """A field that may be left to a callable."""

    def accepted(self, value: object, owner: str) -> Any:
        """Take a callable as it is; it is asked when the value is needed."""
        return value if callable(value) else super().accepted(value, owner)


class Current(Generic[T]):
    """The present value of a field that may be left to a callable; None while it is unknown."""

    def __init__(self) -> None:
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: Settings, owner: type) -> T | None: ...
    def __get__(self, instance: Settings | None, owner: type) -> Self | T | None:
        if instance is None:
            return self
        found: T | None = instance.value(self.name)
        return found


class Settings:
    """A set of named fields, given by keyword.

    Attributes:
        given: What was stated, by the fields' names; the others have their defaults.
        unknown: The names that were given and are no fields.

    Raises:
        OneLoggerError: A field that must be given is not, or one cannot be as it was given.
    """

    def __init__(self, **given: Any) -> None:
        self.given: dict[str, Any] = {}
        fields = dict(self.fields())
        kind = type(self).__name__
        self.unknown = tuple(name for name in given if name not in fields)
        missing = [name for name, each in fields.items() if each.default is REQUIRED and name not in given]
        if missing:
            raise OneLoggerError(f"{kind} needs {', '.join(missing)}")
        for name in self.unknown:
            report(kind, "unknown_field", f"no field {name!r} exists; there are {', '.join(fields)}")
        for name, field in fields.items():
            if name in given:
                field.__set__(self, given[name])
        self.check()

    def __setattr__(self, name: str, value: object) -> None:
        if name not in {"given", "unknown"} and not isinstance(getattr(type(self), name, None), Field):
            report(type(self).__name__, "unknown_field", f"no field {name!r} exists")
        super().__setattr__(name, value)

    @classmethod
    def fields(cls) -> Iterator[tuple[str, Field[Any]]]:
        """Give every field by its name."""
        for each in vars(cls).values():
            if isinstance(each, Field):
                yield each.name, each

    def check(self) -> None:
        """Check what concerns several fields.

        Raises:
            OneLoggerError: They do not go together.
        """

    def value(self, name: str) -> Any:
        """Give the present value of a field, asking its callable if it has one; never raises.

        Args:
            name: With or without `_or_fn`.

        Returns:
            None where it is not set, or its callable raised or gave what cannot be; both are counted.
        """
        field = getattr(type(self), name, None)
        if not isinstance(field, Field):
            field = getattr(type(self), f"{name}_or_fn", None)
            if not isinstance(field, Field):
                return None
        found = self.given.get(field.name, field.default)
        if not callable(found):
            return found
        call = f"{type(self).__name__}.{field.name}"
        try:
            asked = found()
        except Exception as error:  # noqa: BLE001  # the user's callable
            report(call, "callable_raised", f"a value, but it raised {shown(error)}")
            return None
        if asked is None:
            return None  # not known yet
        try:
            return field.check(asked)
        except OneLoggerError as problem:
            report(call, "callable_value", f"{problem}, not {plain_value(asked)!r}")
            return None

    def varying(self) -> frozenset[str]:
        """Give the names, without `_or_fn`, of the fields that are left to a callable."""
        return frozenset(name.removesuffix("_or_fn") for name, value in self.given.items() if callable(value))

    def model_dump(self) -> dict[str, Any]:
        """Give every field by name, callables as they are, nested settings as dictionaries (pydantic's spelling)."""
        told = {name: self.given.get(name, field.default) for name, field in self.fields()}
        return {
            name: value.model_dump() if isinstance(value, Settings) else value for name, value in told.items()
        }

    def model_copy(self, update: Mapping[str, Any] | None = None) -> Self:
        """Copy it, with some fields changed (pydantic's spelling)."""
        return type(self)(**self.given | dict(update or {}))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Settings) or type(self) is not type(other):
            return False
        return all(getattr(self, name) == getattr(other, name) for name, _ in self.fields())

    __hash__ = None  # type: ignore[assignment]  # its fields may be set

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"
        )
