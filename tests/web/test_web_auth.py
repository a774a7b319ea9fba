"""Passwords: acceptance, cached logins, and a flood of wrong passwords."""

from __future__ import annotations

import asyncio
import base64
import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bcrypt
import pytest
from waiting import WAIT_LIMIT_SECONDS, wait_until
from web_support import ServerProcess, port_of, send_request, serving

from exporter.errors import ConfigurationError
from exporter.web.http import Limits
from exporter.web.passwords import Passwords
from exporter.web.protection import WebConfigFile
from exporter.web.server import Server
from exporter.web.workers import BusyError

CHECK_PASSWORD = bcrypt.checkpw


def hash_password(password: str, cost: int = 4, prefix: str = "2b") -> str:
    password_hash = bcrypt.hashpw(password.encode(), bcrypt.gensalt(cost)).decode()
    return password_hash.replace("$2b$", f"${prefix}$")


HASH_BY_COST = {cost: hash_password("any", cost) for cost in (4, 6)}


def basic_auth_header(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def write_users(directory: Path, **hash_by_user: str) -> Path:
    """Write a web configuration with the password hashes of users, and return its path."""
    path = directory / "web.config.yml"
    path.write_text(
        "basic_auth_users:\n"
        + "".join(f"  {user}: {password_hash}\n" for user, password_hash in hash_by_user.items())
    )
    return path


@pytest.mark.parametrize("prefix", ["2a", "2b", "2y"])
def test_only_the_password_of_a_known_user_is_accepted(tmp_path: Path, prefix: str) -> None:
    with serving(
        web_config=write_users(
            tmp_path, alice=hash_password("good", prefix=prefix), bob=hash_password("else")
        )
    ) as server:
        port = port_of(server)
        accepted_status = send_request(port, headers=basic_auth_header("alice", "good")).status
        refusals = [
            send_request(port, headers=basic_auth_header("alice", password))
            for password in ("bad", "else", "good\0", "x" * 73)
        ]
        refusals += [
            send_request(port, headers=basic_auth_header(user, user and "good")) for user in ("eve", "")
        ]

    assert accepted_status == 200
    assert {reply.status for reply in refusals} == {401}


@pytest.mark.parametrize(
    "header", ["", "Basic", "Basic !", "Basic YQ==", "Bearer x", "Basic  YWxpY2U6Z29vZA==", "Basic \xe4"]
)
def test_known_and_unknown_paths_require_a_password(tmp_path: Path, header: str) -> None:
    with serving(web_config=write_users(tmp_path, alice=hash_password("good"))) as server:
        for path in ("/metrics", "/", "/-/healthy", "/nothing"):
            reply = send_request(port_of(server), path, headers={"Authorization": header})

            assert reply.status == 401
            assert reply.headers["www-authenticate"][:5] == "Basic"


@pytest.mark.timeout(60)
def test_password_guessing_locks_out_neither_users_nor_health_checks(tmp_path: Path) -> None:
    hash_by_user = {f"user{index}": hash_password("good", cost=8) for index in range(4)}
    web_config = str(write_users(tmp_path, **hash_by_user))
    with ServerProcess(web_config=web_config, limits={"render_seconds": WAIT_LIMIT_SECONDS}) as process:
        send_request(process.port, headers=basic_auth_header("user0", "good"))
        stop = threading.Event()

        def attack(attacker: int) -> None:
            for attempt in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
                send_request(process.port, headers=basic_auth_header("user0", f"{attacker}-{attempt}"))

        with ThreadPoolExecutor(24) as attackers:
            attacks = attackers.map(attack, range(24))
            time.sleep(0.5)
            replies = [
                send_request(process.port, headers=basic_auth_header(user, "good")) for user in hash_by_user
            ]
            health = send_request(process.port, "/-/healthy", headers=basic_auth_header("user0", "good"))
            stop.set()
        list(attacks)

    assert [reply.status for reply in replies] == [200] * 4
    assert health.status == 200


def test_a_cached_login_survives_a_reload_with_an_unchanged_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked_hashes: list[bytes] = []

    def check(password: bytes, expected: bytes) -> bool:
        checked_hashes.append(expected)
        return CHECK_PASSWORD(password, expected)

    monkeypatch.setattr("bcrypt.checkpw", check)
    alice, bob = hash_password("good"), hash_password("good")
    config = write_users(tmp_path, alice=alice, bob=bob)
    with serving(web_config=config, limits=Limits(file_check_seconds=0.05)) as server:
        port = port_of(server)
        initial_statuses = [
            send_request(port, headers=basic_auth_header(name, "good")).status for name in ("alice", "bob")
        ]
        write_users(tmp_path, alice=alice, bob=hash_password("other"))
        wait_until(lambda: send_request(port, headers=basic_auth_header("bob", "good")).status == 401)
        repeated_status = send_request(port, headers=basic_auth_header("alice", "good")).status

    assert initial_statuses == [200, 200]
    assert repeated_status == 200
    assert checked_hashes.count(alice.encode()) == 1


def test_a_thread_that_cannot_be_started_does_not_end_the_checks_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = WebConfigFile(write_users(tmp_path, alice=HASH_BY_COST[4]), Limits(file_check_seconds=0.01))

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def users_after_change() -> set[str]:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            await file.current()
        write_users(tmp_path, bob=HASH_BY_COST[6])
        deadline = time.monotonic() + WAIT_LIMIT_SECONDS
        while "bob" not in (users := set((await file.current()).config.basic_auth_users)):
            assert time.monotonic() < deadline, users
            await asyncio.sleep(0.01)
        return users

    assert asyncio.run(users_after_change()) == {"bob"}
    file.stop()


class SlowBcrypt:
    """Stand-in for `bcrypt.checkpw` that waits until `may_finish` is set, and records its arguments in `checks`."""

    def __init__(self) -> None:
        self.may_finish = threading.Event()
        self.checks: list[tuple[bytes, bytes]] = []

    def __call__(self, password: bytes, expected: bytes) -> bool:
        self.may_finish.wait(WAIT_LIMIT_SECONDS)
        self.checks.append((password, expected))
        return password == b"good"

    async def check_login(self, passwords: Passwords, user: str, password: str, peer: str) -> bool | str:
        """Check a login. Return True, False or "busy"."""
        deadline = asyncio.get_running_loop().time() + WAIT_LIMIT_SECONDS
        hash_by_user = {"alice": HASH_BY_COST[4], "bob": HASH_BY_COST[6]}
        try:
            return await passwords.admits(
                hash_by_user, basic_auth_header(user, password)["Authorization"], peer, deadline
            )
        except BusyError:
            return "busy"

    async def check_logins(self, passwords: Passwords, *logins: tuple[str, str, str]) -> list[bool | str]:
        """Check logins (user, password, peer) concurrently. Return True, False or "busy" for each login."""
        self.may_finish.clear()
        tasks = [asyncio.ensure_future(self.check_login(passwords, *login)) for login in logins]
        await asyncio.sleep(0.05)
        self.may_finish.set()
        return [await task for task in tasks]


@pytest.fixture
def bcrypt_check(monkeypatch: pytest.MonkeyPatch) -> SlowBcrypt:
    slow_check = SlowBcrypt()
    monkeypatch.setattr("bcrypt.checkpw", slow_check)
    return slow_check


def test_pending_password_checks_are_limited_in_total_and_per_address(bcrypt_check: SlowBcrypt) -> None:
    limits = Limits(passwords_waiting=2, passwords_waiting_per_peer=2)
    logins = [("bob", str(number), f"10.0.0.{number // 3}") for number in range(6)]
    verdicts = asyncio.run(bcrypt_check.check_logins(Passwords(limits), *logins))

    # An address can have two checks; of the remaining checks, one runs and two wait.
    assert verdicts == [False, False, "busy", False, "busy", "busy"]


def test_an_address_with_an_earlier_login_has_priority(bcrypt_check: SlowBcrypt) -> None:
    passwords = Passwords(Limits(passwords_waiting=4))
    asyncio.run(bcrypt_check.check_logins(passwords, ("alice", "good", "10.0.0.1")))
    logins = [("bob", str(number), f"10.0.1.{number}") for number in range(8)]
    logins += [("bob", "good", "10.0.0.1"), ("bob", "x", "10.0.0.2")]
    verdicts = asyncio.run(bcrypt_check.check_logins(passwords, *logins))

    assert verdicts == [False] * 5 + ["busy"] * 3 + [True, "busy"]


def test_a_cached_login_does_not_wait_for_pending_checks(bcrypt_check: SlowBcrypt) -> None:
    passwords = Passwords(Limits())
    login = ("alice", "good", "10.0.0.1")

    async def repeat_login_beside_a_pending_check() -> list[bool | str]:
        await bcrypt_check.check_logins(passwords, login)
        bcrypt_check.may_finish.clear()
        pending_check = asyncio.ensure_future(bcrypt_check.check_login(passwords, "alice", "x", "10.0.0.1"))
        repeated_verdict = await bcrypt_check.check_login(passwords, *login)
        is_pending = not pending_check.done()
        bcrypt_check.may_finish.set()
        return [repeated_verdict, is_pending, await pending_check]

    assert asyncio.run(repeat_login_beside_a_pending_check()) == [True, True, False]


def test_equal_credentials_share_one_check_and_valid_ones_are_cached(bcrypt_check: SlowBcrypt) -> None:
    passwords = Passwords(Limits())
    logins = [("bob", "good", "10.0.0.1")] * 50
    verdicts = [asyncio.run(bcrypt_check.check_logins(passwords, *logins)) for _ in range(2)]

    assert verdicts == [[True] * 50] * 2
    assert len(bcrypt_check.checks) == 1


def test_the_password_of_an_unknown_user_is_checked_at_the_highest_cost_of_the_known_users(
    bcrypt_check: SlowBcrypt,
) -> None:
    verdicts = asyncio.run(bcrypt_check.check_logins(Passwords(Limits()), ("eve", "good", "10.0.0.1")))

    assert verdicts == [False]
    assert bcrypt_check.checks[0][1].startswith(b"$2y$06$")


@pytest.mark.parametrize("password", ["", "good\0", "x" * 73])
def test_a_password_that_bcrypt_cannot_hash_is_refused_without_a_check(
    bcrypt_check: SlowBcrypt, password: str
) -> None:
    login = ("alice", password, "10.0.0.1")
    verdicts = asyncio.run(bcrypt_check.check_logins(Passwords(Limits()), login))

    assert verdicts == [False]
    assert bcrypt_check.checks == []


def test_users_without_the_bcrypt_package_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bcrypt", None)
    with pytest.raises(ConfigurationError, match=r"pip install bcrypt"):
        Server((), listen=["127.0.0.1:0"], web_config=write_users(tmp_path, alice=hash_password("x")))
