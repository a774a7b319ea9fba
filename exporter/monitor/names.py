"""From the free text that names a Stat of torch.monitor to the name of a Stat of this package.

Used in the training process. Pure functions.
"""

from __future__ import annotations

from exporter.recording.definition import LONGEST_NAME

_ROOM = LONGEST_NAME - 40
"""Families add words to a name."""


def stat_name(name: str) -> str:
    """Make a name of words of letters, digits and `_`, joined by dots; what is already one stays as it is."""
    words = [_word(word) for word in name[:_ROOM].split(".")]
    joined = ".".join(word for word in words if word)
    if not joined:
        return "unnamed"
    return joined if joined[0].isalpha() else f"stat_{joined}"


def check_name(name: object, of: str) -> str:
    """Take text, or bytes, as torch does.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(name, bytes):
        return name.decode()
    if not isinstance(name, str):
        raise TypeError(f"the name of {of} must be str, not {type(name).__name__}")
    return name


def _word(text: str) -> str:
    return "".join(each if each == "_" or (each.isascii() and each.isalnum()) else "_" for each in text)
