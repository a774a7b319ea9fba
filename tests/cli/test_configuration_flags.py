"""The command line: flags, the environment and the file make one configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from serve_support import exporter

from exporter.cli.configuration import Configuration, resolve
from exporter.cli.flags import Parser, add_flags
from exporter.cli.main import main
from exporter.errors import ConfigurationError


def resolved(*arguments: str, **environ: str) -> Configuration:
    parser = Parser("exporter", "")
    add_flags(parser)
    return resolve(parser.parse_flags(arguments), environ)


def problems(*arguments: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        resolved(*arguments, **environ)
    return str(caught.value).splitlines()


def test_nothing_given_is_the_defaults() -> None:
    assert resolved() == Configuration()


def test_every_flag_is_heard(tmp_path: Path) -> None:
    web = tmp_path / "web.yml"
    found = resolved(
        "--web.listen-address=:1",
        "--web.listen-address",
        "[::1]:2",
        f"--web.config.file={web}",
        "--web.enable-lifecycle",
        "--feed.dir=/f",
        "--state.dir=/s",
        "--log.level=debug",
        "--log.format=json",
    )

    assert found.web.listen_address == (":1", "[::1]:2")
    assert (found.web.config_file, found.web.enable_lifecycle) == (web, True)
    assert (found.feed.dir, found.state.dir) == (Path("/f"), Path("/s"))
    assert (found.log.level, found.log.format) == ("debug", "json")


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("feed: {dir: /file, interval: 2s}\nweb: {enable_lifecycle: true}\nlog: {level: warn}")
    flag, variable = "--feed.dir=/flag", "/variable"
    given = f"--config.file={file}"

    assert resolved(given, flag, EXPORTER_FEED_DIR=variable).feed.dir == Path("/flag")
    assert resolved(given, EXPORTER_FEED_DIR=variable).feed.dir == Path("/variable")
    assert resolved(given, EXPORTER_FEED_DIR="").feed.dir == Path("/file")
    assert resolved(EXPORTER_STATE_DIR="/x").state.dir is None
    assert resolved(given).feed.interval == 2.0
    assert resolved(given, "--no-web.enable-lifecycle").web.enable_lifecycle is False
    assert resolved(given, "--log.level=info").log.level == "info"


def test_a_path_in_a_file_is_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "feed: {dir: f}\nweb: {config_file: ../w.yml}\nstate: {dir: /s}\nenergy: {carbon_intensity_file: c}"
    )
    (tmp_path / "c.yaml").write_text(text)
    monkeypatch.chdir(tmp_path.parent)

    found = resolved(f"--config.file={tmp_path.name}/c.yaml")

    assert found.feed.dir == tmp_path / "f"
    assert found.web.config_file == tmp_path / ".." / "w.yml"
    assert (found.state.dir, found.energy.carbon_intensity_file) == (Path("/s"), tmp_path / "c")
    assert resolved("--feed.dir=f").feed.dir == Path("f")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--web.listn-address=:1"],
            '--web.listn-address: unknown flag, did you mean "--web.listen-address"?',
        ),
        (["--log.lev=debug"], '--log.lev: unknown flag, did you mean "--log.level"?'),
        (["--no-collector.cpu"], "write collectors: {cpu: {enabled: false}} in the file of --config.file"),
        (["serve"], "command line: unexpected argument 'serve'"),
        (["--feed.dir"], "--feed.dir: expected one argument"),
        (["--feed.dir="], '--feed.dir: expected a path, found ""'),
        (["--web.enable-lifecycle=true"], "ignored explicit argument 'true'"),
        (["--log.level=loud"], '--log.level: expected one of debug, info, warn, error, found "loud"'),
        (["--log.level=eror"], 'did you mean "error"?'),
        (["--web.listen-address=:99999"], "--web.listen-address: expected an address such as :20909"),
        (
            ["--web.listen-address=:1", "--web.listen-address=:1"],
            '--web.listen-address: ":1" is listed twice',
        ),
        (["--config.file=/nowhere.yaml"], "/nowhere.yaml: cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_flag_is_one_line(arguments: list[str], expected: str) -> None:
    (line,) = problems(*arguments)

    assert expected in line


def test_problems_of_all_sources_come_at_once(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("log: {level: loud}\nfeed: {interval: 0s}")

    found = problems(
        f"--config.file={file}", "--log.format=xml", "--web.listen-address=x", EXPORTER_FEED_DIR="a\0b"
    )

    assert [line.split(": ")[0] for line in found] == [
        f"{file}:1:14",
        f"{file}:2:18",
        "$EXPORTER_FEED_DIR",
        "--web.listen-address",
        "--log.format",
    ]


def test_config_check_says_ok_or_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, web = tmp_path / "c.yaml", tmp_path / "w.yml"
    file.write_text("web: {config_file: w.yml}")
    web.write_text("")
    good = main([f"--config.file={file}", "--config.check"], {})
    said = capsys.readouterr()
    web.write_text("nonsense: 1\nbasic_auth_users: []")
    bad = main([f"--config.file={file}", "--config.check"], {})
    complained = capsys.readouterr()

    assert (good, said.out, said.err) == (0, "ok\n", "")
    assert (bad, complained.out) == (2, "")
    assert [line.partition(": ")[0] for line in complained.err.splitlines()] == ["exporter", "exporter"]
    assert f"{web}:1:1: nonsense: unknown key" in complained.err


def test_an_unknown_command_is_told_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["rnu", "--", "true"], {})

    assert status == 2
    assert capsys.readouterr().err == "exporter: command line: unknown command 'rnu', did you mean \"run\"?\n"


def test_version_and_help_end_in_peace() -> None:
    version, usage = exporter("--version"), exporter("-h")

    assert (version.returncode, version.stderr) == (0, "")
    assert version.stdout.startswith("training-exporter, version ")
    assert usage.returncode == 0
    assert "--web.listen-address ADDRESS" in usage.stdout
    assert "--run.attached" not in usage.stdout
