"""Parser of Python's command line: the script or the module that an interpreter runs."""

from __future__ import annotations

from collections.abc import Sequence

from exporter.recording.value_class import Value, value_class


@value_class
class PythonProgram(Value):
    """Program of a Python process. The fields are empty for `-c`, standard input and an interactive interpreter."""

    script: str = ""
    module: str = ""  # argument of `-m`
    arguments: tuple[str, ...] = ()  # arguments of the script or the module


def parse_python_command(command: Sequence[str]) -> PythonProgram:
    """Parse the command line of a Python process, whose first argument is the interpreter."""
    arguments = iter(command[1:])
    for argument in arguments:
        if argument == "--check-hash-based-pycs":
            next(arguments, None)
        elif argument == "-":
            return PythonProgram()
        elif not argument.startswith("-"):
            return PythonProgram(script=argument, arguments=tuple(arguments))
        elif not argument.startswith("--"):
            # A group of options such as `-uX dev` or `-Bmtrain`: the first option with a value ends the group.
            option = next((letter for letter in argument[1:] if letter in "cmWX"), "")
            _, _, value = argument.partition(option) if option else ("", "", "")
            if option and not value:
                value = next(arguments, "")
            if option == "c":
                return PythonProgram()
            if option == "m":
                return PythonProgram(module=value, arguments=tuple(arguments))
    return PythonProgram()
