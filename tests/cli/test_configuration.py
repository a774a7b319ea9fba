"""Configuration from flags, environment and file, Stat rules, and the generated schema and example."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]  # the package has no types
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from places import PROJECT
from rules_support import load_script
from serve_support import run_exporter

from exporter.cli.configuration import Configuration, StatRuleOptions, resolve
from exporter.cli.flags import Parser, add_flags
from exporter.cli.main import main
from exporter.cli.sections import LogSection, WebSection
from exporter.collectors.catalogue import CATALOGUE, entries
from exporter.config.dump import dump
from exporter.config.loader import load
from exporter.errors import ConfigurationError
from exporter.recording.definition import check_rules
from exporter.recording.values import Aggregation


def resolve_command_line(*arguments: str, **environ: str) -> Configuration:
    parser = Parser("exporter", "")
    add_flags(parser)
    return resolve(parser.parse_flags(arguments), environ)


def problem_lines(*arguments: str, **environ: str) -> list[str]:
    """Return the lines of the error for an invalid command line or environment."""
    with pytest.raises(ConfigurationError) as error_info:
        resolve_command_line(*arguments, **environ)
    return str(error_info.value).splitlines()


def test_every_flag_changes_its_option() -> None:
    web = ("--web.listen-address=:1", "--web.listen-address", "[::1]:2", "--web.config.file=/w.yml")
    flags = ("--web.enable-lifecycle", "--feed.dir=/f", "--state.dir=/s", "--gpu.replay=t4")
    options = resolve_command_line(*web, *flags, "--log.level=debug", "--log.format=json")

    assert resolve_command_line() == Configuration()
    assert options.web == WebSection((":1", "[::1]:2"), Path("/w.yml"), enable_lifecycle=True)
    assert (options.feed.dir, options.state.dir, options.gpu.replay) == (Path("/f"), Path("/s"), "t4")
    assert options.log == LogSection("debug", "json")


def test_flags_override_environment_file_and_default(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("feed: {dir: /file, interval: 2s}\nweb: {enable_lifecycle: true}\nlog: {level: warn}")
    flag, variable = "--feed.dir=/flag", "/variable"
    file_flag = f"--config.file={file}"

    assert resolve_command_line(file_flag, flag, EXPORTER_FEED_DIR=variable).feed.dir == Path("/flag")
    assert resolve_command_line(file_flag, EXPORTER_FEED_DIR=variable).feed.dir == Path("/variable")
    assert resolve_command_line(file_flag, EXPORTER_FEED_DIR="").feed.dir == Path("/file")
    assert resolve_command_line(EXPORTER_STATE_DIR="/x").state.dir is None
    assert resolve_command_line(file_flag).feed.interval == 2.0
    assert resolve_command_line(file_flag, "--no-web.enable-lifecycle").web.enable_lifecycle is False
    assert resolve_command_line(file_flag, "--log.level=info").log.level == "info"


def test_a_path_in_a_file_is_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text(
        "feed: {dir: f}\nweb: {config_file: ../w.yml}\nstate: {dir: /s}\nenergy: {carbon_intensity_file: c}"
    )
    monkeypatch.chdir(tmp_path.parent)

    options = resolve_command_line(f"--config.file={tmp_path.name}/c.yaml")

    assert options.feed.dir == tmp_path / "f"
    assert options.web.config_file == tmp_path / ".." / "w.yml"
    assert (options.state.dir, options.energy.carbon_intensity_file) == (Path("/s"), tmp_path / "c")
    assert resolve_command_line("--feed.dir=f").feed.dir == Path("f")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--log.lev=debug", '--log.lev: unknown flag, did you mean "--log.level"?'),
        ("--no-collector.cpu", "write collectors: {cpu: {enabled: false}} in the file of --config.file"),
        ("serve", "command line: unexpected argument 'serve'"),
        ("--feed.dir", "--feed.dir: expected one argument"),
        ("--feed.dir=", '--feed.dir: expected a path, found ""'),
        ("--web.enable-lifecycle=true", "ignored explicit argument 'true'"),
        ("--log.level=eror", '--log.level: expected one of debug, info, warn, error, found "eror"'),
        ("--web.listen-address=:99999", "--web.listen-address: expected an address such as :20909"),
        ("--web.listen-address=:1 --web.listen-address=:1", '--web.listen-address: ":1" is listed twice'),
        ("--config.file=/nowhere.yaml", "/nowhere.yaml: cannot be read: No such file or directory"),
    ],
)
def test_an_invalid_flag_is_one_line(arguments: str, expected: str) -> None:
    (line,) = problem_lines(*arguments.split())

    assert expected in line


def test_problems_of_all_sources_are_reported_together(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("log: {level: loud}\nfeed: {interval: 0s}")

    messages = problem_lines(
        f"--config.file={file}", "--log.format=xml", "--web.listen-address=x", EXPORTER_FEED_DIR="a\0b"
    )

    assert [line.split(": ")[0] for line in messages] == [
        f"{file}:1:14",
        f"{file}:2:18",
        "$EXPORTER_FEED_DIR",
        "--web.listen-address",
        "--log.format",
    ]


@pytest.mark.parametrize(
    ("configuration", "problem"),
    [
        (
            "web: {config_file: web.yml}",
            "tls_server_config.cert_file: {}/none.pem cannot be read: No such file",
        ),
        ("collectors: {extra: {classes: ['nosuch:Class']}}", "nosuch:Class cannot be imported"),
        (
            "collectors:\n  cpu: {interval: 1s, deadline: 2s}",
            ":2:33: collectors.cpu.deadline: 2s is above the interval",
        ),
        ("gpu: {interval: 1s, deadline: 2s}", "gpu.deadline: 2s is above the interval 1s"),
    ],
)
def test_config_check_reports_problems_that_otherwise_appear_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], configuration: str, problem: str
) -> None:
    (tmp_path / "web.yml").write_text("tls_server_config: {cert_file: none.pem, key_file: none.pem}")
    file = tmp_path / "c.yaml"
    file.write_text(configuration)

    status = main([f"--config.file={file}", "--config.check"], {})

    assert status == 2
    assert problem.format(tmp_path) in capsys.readouterr().err


def test_checkpoint_paths_of_a_file_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("collectors: {checkpoint_dirs: {paths: [checkpoints, /absolute]}}")

    options = resolve_command_line(f"--config.file={file}").collectors.checkpoint_dirs

    assert options.paths == (tmp_path / "checkpoints", Path("/absolute"))


def test_config_check_prints_ok_or_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, web_file = tmp_path / "c.yaml", tmp_path / "w.yml"
    file.write_text("web: {config_file: w.yml}")
    web_file.write_text("")
    valid_status = main([f"--config.file={file}", "--config.check"], {})
    valid_output = capsys.readouterr()
    web_file.write_text("nonsense: 1\nbasic_auth_users: []")
    invalid_status = main([f"--config.file={file}", "--config.check"], {})
    invalid_output = capsys.readouterr()

    assert (valid_status, valid_output.out, valid_output.err) == (0, "ok\n", "")
    assert (invalid_status, invalid_output.out, len(invalid_output.err.splitlines())) == (2, "", 2)
    assert f"exporter: {web_file}:1:1: nonsense: unknown key" in invalid_output.err


def test_an_unknown_command_is_reported_with_the_nearest_command(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["rnu", "--", "true"], {})

    assert status == 2
    assert capsys.readouterr().err == "exporter: command line: unknown command 'rnu', did you mean \"run\"?\n"


def test_version_and_help_exit_with_status_0() -> None:
    version, usage = run_exporter("--version"), run_exporter("-h")

    assert (version.returncode, version.stderr, usage.returncode) == (0, "", 0)
    assert version.stdout.startswith("training-exporter, version ")
    assert usage.stdout.startswith("usage: training-exporter ")
    assert "--web.listen-address ADDRESS" in usage.stdout
    assert "--run.attached" not in usage.stdout


generator = load_script(PROJECT / "docs/generate_configuration.py")


def keys_of(node: object) -> Iterator[str]:
    """Yield every key of a JSON Schema's properties, at any depth."""
    if isinstance(node, Mapping):
        for name, inner in node.get("properties", {}).items():
            yield name
            yield from keys_of(inner)
        yield from keys_of(node.get("items"))


def file_problems(configuration: str) -> list[str]:
    """Return the problems of a configuration in YAML, an empty list if it is valid."""
    try:
        load(configuration, "c", Configuration)
    except ConfigurationError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("configuration", "expected"),
    [
        ("web: {listen_address: []}", "c:1:23: web.listen_address: needs at least one address"),
        ("web: {listen_address: ['foo bar:3']}", "c:1:24: web.listen_address[0]: expected an address"),
        ("collectors: {pressure: {per_core: true}}", 'collectors.pressure.per_core: unknown key "per_core"'),
        ("energy: {electricity_price: 1}", "energy.currency: is needed for prices"),
        ("recording: [{}]", 'c:1:13: recording[0]: missing key "match"'),
        ("recording: [{match: 3}]", "c:1:21: recording[0].match: expected a pattern"),
        ("recording: [{match: 'a['}]", "recording[0].match: expected a pattern"),
        ("recording: [{match: a, window_seconds: 50ms}]", 'of at least 100ms, found "50ms"'),
        (
            "recording: [{match: a, window_seconds: null, window_samples: null}]",
            "recording[0].window_samples: and window_seconds must not both be null",
        ),
        ("recording: [{match: a, buckets: [2, 1]}]", "c:1:33: recording[0].buckets: must be"),
        (
            "recording: [{match: a, aggregations: [mean], buckets: [1]}]",
            "require histogram among the aggregations",
        ),
        (f"recording: [{'{match: a}, ' * 1001}]", "c:1:12: recording: has 1001 rules, at most 1000"),
    ],
)
def test_an_invalid_setting_is_reported_with_its_place(configuration: str, expected: str) -> None:
    (problem,) = file_problems(configuration)

    assert expected in problem


def test_every_collector_of_the_catalogue_can_be_set_with_its_own_defaults() -> None:
    catalogue_entries = entries(load("collectors: {cpu: {interval: 1s}}", "c", Configuration).collectors)

    assert [entry.name for entry in catalogue_entries] == [*(entry.name for entry in CATALOGUE), "extra"]
    for entry, default in zip(catalogue_entries, CATALOGUE, strict=False):
        assert entry.options.interval == (1.0 if entry.name == "cpu" else default.options.interval)
        assert entry.factory(**entry.options.own_options()).name == entry.name


RULES = st.builds(
    lambda match, fields: StatRuleOptions(match, **fields),
    st.text("ab.*?", min_size=1, max_size=20),
    st.fixed_dictionaries(
        {},
        optional={
            "enabled": st.booleans(),
            "aggregations": st.frozensets(st.sampled_from(Aggregation)),
            "window_seconds": st.integers(100, 10**7).map(lambda milliseconds: milliseconds / 1000),
            "window_samples": st.none() | st.integers(1, 10**9),
        },
    ),
)


@settings(max_examples=30)  # each example writes and reads a whole configuration
@given(st.lists(RULES, max_size=3))
def test_a_configuration_that_is_printed_is_read_back_unchanged(rules: list[StatRuleOptions]) -> None:
    configuration = dataclasses.replace(Configuration(), recording=tuple(rules))

    assert load(dump(configuration), "c", Configuration) == configuration


@given(RULES)
def test_a_training_process_accepts_every_rule_that_the_configuration_accepts(rule: StatRuleOptions) -> None:
    valid_rules, errors = check_rules([json.loads(json.dumps(rule.as_override()))])

    assert (len(valid_rules), errors) == (1, [])


def test_the_committed_schema_and_example_are_the_generated_ones() -> None:
    committed_schema = json.loads((PROJECT / generator.SCHEMA_FILE).read_text())

    assert committed_schema == generator.schema(), "run: make docs"
    assert (PROJECT / generator.EXAMPLE_FILE).read_text() == generator.example()


def test_the_example_equals_the_defaults_and_has_every_key_of_the_schema() -> None:
    example = (PROJECT / generator.EXAMPLE_FILE).read_text()
    keys = set(re.findall(r"^[# ]*(?:- )?(\w+):(?: |$)", example, re.MULTILINE))

    assert example.startswith("# yaml-language-server: $schema=config.schema.json\n")
    assert load(example, "c", Configuration) == Configuration()
    assert set(keys_of(generator.schema())) <= keys


def test_the_commented_rule_of_the_example_can_be_used() -> None:
    lines = (PROJECT / generator.EXAMPLE_FILE).read_text().splitlines()
    first_line = lines.index("# recording:")
    uncommented = "\n".join(line.removeprefix("# ") for line in lines[first_line:])

    (rule,) = load(uncommented, "c", Configuration).recording
    assert set(rule.as_override()) == {field.name for field in dataclasses.fields(StatRuleOptions)}


@pytest.mark.parametrize(
    ("configuration", "is_valid"),
    [
        ((PROJECT / generator.EXAMPLE_FILE).read_text(), True),
        ("{}", True),
        ("recording: [{match: a, window_seconds: null, buckets: [1, 2.5]}]", True),
        ("wbe: {}", False),
        ("feed: {interval: 5}", False),
        ("feed: {interval: 5x}", False),
        ("log: {level: loud}", False),
        ("recording: [{}]", False),
        ("recording: [{match: a, aggregations: [men]}]", False),
        ("collectors: {pressure: {per_core: true}}", False),
        ("exposition: {max_series: 1}", False),
    ],
)
def test_the_schema_is_valid_and_agrees_with_the_loader(configuration: str, is_valid: bool) -> None:
    jsonschema.Draft202012Validator.check_schema(generator.schema())
    validator = jsonschema.Draft202012Validator(generator.schema())

    assert validator.is_valid(yaml.safe_load(configuration)) is is_valid
    assert bool(file_problems(configuration)) is not is_valid
