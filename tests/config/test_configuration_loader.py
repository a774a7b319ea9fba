"""Loading of YAML into dataclasses. Problems are reported together, with positions."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.config.dump import dump
from exporter.config.loader import load, load_file, parse
from exporter.config.nodes import MAX_BYTES
from exporter.config.options import (
    Duration,
    Glob,
    Range,
    Ratio,
    Secret,
    format_duration,
    parse_duration,
)
from exporter.errors import ConfigurationError, Problem


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Leaf:
    number: Annotated[int, Range(1, 100)] = 3
    share: Ratio = 0.5
    flag: bool = False
    text: str = ""
    wait: Annotated[Duration, Range(0.1, 60)] = 10.0
    pause: Duration | None = None
    color: Color = Color.RED
    mode: Literal["fast", "slow"] = "fast"
    texts: tuple[str, ...] = ()
    colors: frozenset[Color] = frozenset()
    either: int | str = 1
    path: Path | None = None
    custom_key: str = field(default="", metadata={"key": "X-Dashed"})


@dataclass(frozen=True, slots=True)
class NamedEntry:
    name: str
    secret: Annotated[str, Secret()] = ""
    low: float = 0.0
    high: float = 1.0
    pattern: Glob = "*"

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.low > self.high:
            yield "low", "is above high"
            yield "high", "is below low"


@dataclass(frozen=True, slots=True)
class Defaults:
    cpu: Leaf = Leaf(number=9)
    memory: Leaf = Leaf(number=8)


@dataclass(frozen=True, slots=True)
class Root:
    leaf: Leaf = Leaf(number=7)
    names: list[NamedEntry] = field(default_factory=list)
    free: dict[str, str] = field(default_factory=dict)
    defaults: Defaults = Defaults()


def problems_of(yaml_text: str | bytes) -> list[str]:
    with pytest.raises(ConfigurationError) as error_info:
        load(yaml_text, "f.yaml", Root)
    return [str(problem) for problem in error_info.value.problems]


def root_or_problems(yaml_text: str) -> Root | Sequence[Problem]:
    """Return the loaded configuration, or the problems if the text is refused."""
    try:
        return load(yaml_text, "f.yaml", Root)
    except ConfigurationError as error:
        return error.problems


def test_every_type_is_read() -> None:
    yaml_text = """
leaf:
  number: 5
  share: 1
  flag: true
  text: "on"
  wait: 1m
  pause: 1h30m
  color: blue
  mode: slow
  texts: [a, 2001-01-01]
  colors: [red, blue]
  either: two
  path: /tmp/x
  X-Dashed: yes and no
names:
  - {name: n, low: -1e3, high: 0x10, pattern: "a*"}
free: {k: v}
"""

    root = load(yaml_text, "f.yaml", Root)

    assert root.leaf == Leaf(
        number=5,
        share=1.0,
        flag=True,
        text="on",
        wait=60.0,
        pause=5400.0,
        color=Color.BLUE,
        mode="slow",
        texts=("a", "2001-01-01"),
        colors=frozenset(Color),
        either="two",
        path=Path("/tmp/x"),
        custom_key="yes and no",
    )
    assert root.names == [NamedEntry("n", low=-1000.0, high=16.0, pattern="a*")]
    assert type(root.leaf.share) is float
    assert root.free == {"k": "v"}


def test_a_mapping_is_merged_into_the_default_of_its_field() -> None:
    root = load("leaf: {flag: true}\ndefaults: {cpu: {flag: true}}", "f.yaml", Root)

    assert root.leaf.number == 7
    assert root.defaults.cpu == Leaf(number=9, flag=True)
    assert root.defaults.memory == Leaf(number=8)


@pytest.mark.parametrize(
    ("yaml_text", "expected"),
    [
        ("leaf: {numbr: 1}", '1:8: leaf.numbr: unknown key "numbr", did you mean "number"?'),
        ("zzz: 1", 'f.yaml:1:1: zzz: unknown key "zzz", expected one of leaf, names, free, defaults'),
        ("leaf: {}\nleaf: {}", "f.yaml:2:1: leaf: duplicate key, first set on line 1"),
        ("names: [{}]", '1:9: names[0]: missing key "name" (a text)'),
        ("leaf: {number: one}", '1:16: leaf.number: expected a whole number from 1 to 100, found "one"'),
        ("leaf: {number: 0}", "1:16: leaf.number: expected a whole number from 1 to 100, found 0"),
        ("leaf: {share: .nan}", "expected a number from 0 to 1, found .nan"),
        ("leaf: {flag: 1}", "expected true or false, found 1"),
        ("leaf: {text: yes}", "expected a text, found yes; put text in quotes"),
        ("leaf: {text: [a]}", "expected a text, found a list; put text in quotes"),
        ("leaf: {wait: 15}", "1m30s or 1h from 100ms to 1m, found 15"),
        ("leaf: {wait: 1s1m}", 'found "1s1m"'),
        ("leaf: {color: bleu}", 'expected one of red, blue, found "bleu", did you mean "blue"?'),
        ("leaf: {mode: fats}", 'did you mean "fast"?'),
        ("leaf: {texts: a}", 'expected a list, found "a"; write it as a list, [...]'),
        ("leaf: {colors: [red, red]}", "1:22: leaf.colors[1]: is listed twice"),
        ("leaf: {either: 1.5}", "expected a whole number or a text, found 1.5"),
        ('leaf: {path: "a\\0b"}', 'expected a path, found "a\\x00b"'),
        ('leaf: {text: "\\ud800"}', "1:14: leaf.text: contains half of a surrogate pair"),
        ("leaf:", "1:6: leaf: the value is missing; write {}, or remove the key for its default"),
        ("names:", "1:7: names: the value is missing; write [], or remove the key for its default"),
        ("leaf: {number: }", "leaf.number: the value is missing; expected a whole number from 1 to 100"),
        ("- leaf", "1:1: expected a mapping, found a list"),
        ("free: {1: a}", "1:8: free: a key must be a text, found 1; put it in quotes"),
        ("? [a]\n: b", "1:3: a key must be a text, found a list"),
        ("<<: {}", '1:1: "<<": unknown key "<<", expected one of leaf'),
        ("leaf: *x", "1:7: alias *x: aliases are not supported; repeat the value"),
        ("leaf: !!python/object/apply:os.system [ls]", "1:7: leaf: expected a mapping, found a list"),
        ("a: 1\n---\nb: 1", "2:1: expected a single document in the stream, but found another document"),
        ("leaf:\n\tnumber: 1", "2:1: while scanning for the next token, found character '\\t'"),
        ("leaf: {", "1:8: while parsing a flow"),
        ("a\0b", "1:2: the character \\x00 is not allowed in YAML"),
        ('"\\UFFFFFFFF"', "f.yaml: not YAML:"),
        (b"leaf:\n  text: \xff", "f.yaml:2:9: the byte 0xff is not UTF-8"),
        ("[" * 5000, "f.yaml:1:33: nested deeper than 32 levels"),
        (" " * (MAX_BYTES + 1), "f.yaml: larger than 256 KiB"),
    ],
)
def test_a_problem_is_reported_with_its_place(yaml_text: str | bytes, expected: str) -> None:
    (message,) = problems_of(yaml_text)

    assert message.startswith("f.yaml:")
    assert expected in message


def test_all_problems_are_reported_together_in_order() -> None:
    messages = problems_of("leaf:\n  flag: 1\n  numbr: 1\nnames:\n  - secret: [1]\nzzz: {}\n")

    positions = [":".join(problem.split(":")[1:3]) for problem in messages]
    assert positions == ["2:9", "3:3", "5:5", "5:13", "6:1"]


def test_contradicting_fields_are_reported_at_each_field() -> None:
    messages = problems_of("names:\n  - name: a\n    low: 3\n    high: 2\n")

    assert messages == [
        "f.yaml:3:10: names[0].low: is above high",
        "f.yaml:4:11: names[0].high: is below low",
    ]


@dataclass(frozen=True, slots=True)
class Users:
    passwords: Mapping[str, Annotated[str, Secret()]]


def test_a_printed_mapping_does_not_show_its_secrets() -> None:
    assert dump(Users({"ada": "hush"})) == "passwords: {ada: <secret>}\n"


@pytest.mark.parametrize("secret", ["12345", "[hush]", "{hush: 1}"])
def test_a_problem_with_a_secret_does_not_show_the_secret(secret: str) -> None:
    (message,) = problems_of(f"names: [{{name: a, secret: {secret}}}]")

    assert secret.strip("[]{}") not in message


def test_hostile_text_stays_on_one_line_of_the_message() -> None:
    messages = problems_of('"a\\nf.yaml:9:9: fake": 1\n"\\e[2Jkey": 1\n"\\u202e": 1\n')

    assert [message.isprintable() for message in messages] == [True, True, True]


def test_an_unreadable_file_is_reported_with_the_reason(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigurationError, match=f"{path}: cannot be read: {reason}"):
            load_file(path, Root)


def test_an_endless_file_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="larger than 256 KiB"):
        load_file("/dev/zero", Root)


def test_a_flag_is_read_literally() -> None:
    assert parse("yes", "--f", str) == "yes"
    assert parse("1m30s", "--f", Duration) == 90.0
    assert parse("a'b", "--f", Path) == Path("a'b")
    with pytest.raises(ConfigurationError, match=r'^--f: expected one of a, b, found "c"$'):
        parse("c", "--f", Literal["a", "b"])
    with pytest.raises(ConfigurationError, match=r"^--f: expected a path, found"):
        parse("", "--f", Path)


@given(st.integers(0, 10**13))
def test_a_duration_is_read_back_as_it_is_written(milliseconds: int) -> None:
    seconds = milliseconds / 1000

    assert parse_duration(format_duration(seconds)) == seconds


YAML_LIKE = st.text(
    st.sampled_from("leafnumbrtx:- {}[],#&*!|>'\"%@`?<~0159.ey\n\t\\u\0\x85\ud800\u2028"), max_size=60
)


@given(st.one_of(YAML_LIKE, st.text(max_size=60)))
@example("%")
@example("? ")
@example("'\ud800'")
@example("%TAG ! x\n--- !a b")
@example("! a")
@example('"\\x')
def test_any_text_gives_a_value_or_the_documented_error(yaml_text: str) -> None:
    outcome = root_or_problems(yaml_text)

    if not isinstance(outcome, Root):
        assert outcome
        for problem in outcome:
            assert problem.message.isprintable()
            assert problem.line is None or problem.line >= 1
