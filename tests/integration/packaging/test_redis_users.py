"""The users of deploy/redis on a real server: each has what its service needs, and no more."""

from __future__ import annotations

import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from redis.exceptions import NoPermissionError

import turnstream
from testkit import wait_until
from testkit.services.certificates import make_certificate
from testkit.services.compose import REPOSITORY, LocalStack
from turnstream.store.client.connection import connect
from turnstream_server.embedded import find_binary, free_port

pytestmark = pytest.mark.redis

USERS: Final = ("batcher", "engine", "gateway", "generator", "operator", "sampler", "trainer")

STORE: Final = "clients/python/src/turnstream/store"
KEYS: Final = "services/turnstream_server/keys"
BUS: Final = "services/turnstream_server/ledger"
PUBLISHING: Final = ("clients/python/src/turnstream/generator/outbox", f"{STORE}/run")
OPERATING: Final = (*PUBLISHING, f"{STORE}/waits", f"{BUS}/admin", f"{BUS}/queries", KEYS)
SCRIPTS: Final = {
    "generator": (*PUBLISHING, f"{STORE}/waits"),
    "batcher": (
        *(*PUBLISHING, f"{STORE}/waits", f"{BUS}/planning", f"{BUS}/release", f"{BUS}/sessions"),
        *(f"{BUS}/leadership", f"{BUS}/core", f"{BUS}/queries", KEYS),
    ),
    "gateway": (*OPERATING, f"{BUS}/sessions"),
    "operator": OPERATING,
    "engine": ("services/turnstream_server/operations",),
    "gateway of hosted models": ("services/turnstream_server/operations",),
}
"""Folders of the scripts and decisions of each user. Only batchers call `register_batcher`."""

FORBIDDEN: Final = (
    "CONFIG SET maxmemory 1",
    "FLUSHALL",
    "FLUSHDB",
    "KEYS *",
    "SCAN 0",
    "RANDOMKEY",
    "SHUTDOWN NOSAVE",
    "MONITOR",
    "REPLICAOF NO ONE",
    "SWAPDB 0 1",
    "CLIENT LIST",
    "ACL SETUSER default on nopass",
    "SCRIPT FLUSH",
    "FUNCTION FLUSH",
    "MODULE LIST",
    "PUBLISH channel text",
    "HSET another key 1",
)
"""Commands that no user needs."""

FORBIDDEN_OF: Final = {
    "generator": (
        *("DEL ts:{demo}:plan", "UNLINK ts:{demo}:plan", "XTRIM ts:{demo}:events MAXLEN 0"),
        *("HGETALL tk:keys", "HSET tm:bases byte {}"),
    ),
    "trainer": (
        *("DEL ts:{demo}:plan", "HDEL ts:{demo}:frontier stepped", "XTRIM ts:{demo}:plan MAXLEN 0"),
        *("HGETALL tk:keys", "HGETALL tm:bases"),
    ),
    "batcher": ("RENAME ts:{demo}:ledger ts:{demo}:doomed", "SREM ts:runs demo"),
    "gateway": ("XTRIM ts:{demo}:events MAXLEN 0",),
    "engine": (
        *("HGETALL ts:{demo}:ledger", "HSET ts:{demo}:frontier stepped 9", "HGETALL tk:keys"),
        "ZADD ts:batchers 1 other:7600",
    ),
    "sampler": ("HGETALL ts:{demo}:frontier", "HGETALL tk:keys", "DEL tm:bases"),
    "operator": (),
}


@pytest.fixture(scope="module", params=["valkey", "redis-server"])
def binary(request: pytest.FixtureRequest) -> str:
    """Return the path of a server."""
    path = str(find_binary()) if request.param == "valkey" else shutil.which("redis-server")
    if path is None:
        pytest.skip("no redis-server is installed")
    return path


@pytest.fixture(scope="module")
def stack(binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Run the store of docker-compose.yml."""
    with LocalStack(tmp_path_factory.mktemp("users")) as stack:
        stack.start_store(binary=binary)
        yield stack


def client_of(stack: LocalStack, user: str) -> redis.Redis:
    return connect(stack.store_url(user), num_retries=20)


def allowed_of(user: str) -> set[str]:
    """Return the commands of a user in users.acl."""
    text = (REPOSITORY / "deploy/redis/users.acl").read_text()
    rules = re.search(rf"^user {user} (.*?)^$", f"{text}\n", re.MULTILINE | re.DOTALL)
    assert rules is not None
    return set(re.findall(r"\+(\S+)", rules[1]))


@pytest.mark.parametrize("user", USERS)
def test_user_is_refused_what_it_does_not_need(stack: LocalStack, user: str) -> None:
    with client_of(stack, user) as client:
        client.ping()
        for command in (*FORBIDDEN, *FORBIDDEN_OF[user]):
            with pytest.raises(NoPermissionError):
                client.execute_command(*command.split())


@pytest.mark.parametrize("user", USERS)
def test_script_has_the_permissions_of_its_caller(stack: LocalStack, user: str) -> None:
    with client_of(stack, user) as client:
        sha = client.script_load("return redis.call('FLUSHALL')")
        foreign = client.script_load("return redis.call('HSET', KEYS[1], 'a', '1')")

        for words in ((sha, 0), (foreign, 1, "another")):
            with pytest.raises(redis.ResponseError, match=r"(?i)can't run|no permissions|ACL"):
                client.execute_command("EVALSHA", *words)


def test_caller_without_a_user_is_refused(stack: LocalStack) -> None:
    with (
        client_of(stack, "operator") as waits,
        connect(f"redis://127.0.0.1:{stack.store_port}") as client,
    ):
        waits.ping()

        with pytest.raises(redis.AuthenticationError):
            client.ping()
        for words in (("AUTH", ""), ("AUTH", "default", ""), ("AUTH", "default", "default")):
            with pytest.raises(redis.AuthenticationError):
                client.execute_command(*words)


def test_killed_store_with_users_keeps_every_write(binary: str, tmp_path: Path) -> None:
    # Redis reads its file as the user `default`. Without permissions of that user it dropped all
    # writes of a script that makes several of them: they are a transaction in the file.
    # It syncs each write: with `everysec`, a store on a slow disk answers before it writes.
    always = ("--appendfsync", "always")
    source = "redis.call('HSET', KEYS[1], 'a', '1') redis.call('HSET', KEYS[1], 'b', '2')"
    with LocalStack(tmp_path) as stack:
        process = stack.start_store(*always, binary=binary)
        with client_of(stack, "batcher") as client:
            client.hset("ts:one", "a", "1")
            client.evalsha(client.script_load(source), 1, "ts:several")
            with client.pipeline(transaction=True) as pipeline:
                pipeline.hset("ts:pipeline", mapping={"a": "1"})
                pipeline.hset("ts:pipeline", "b", "2")
                pipeline.execute()
        process.kill()
        process.wait()
        stack.start_store(*always, binary=binary)

        with client_of(stack, "batcher") as client:
            found = [client.hlen(f"ts:{name}") for name in ("one", "several", "pipeline")]

    assert found == [1, 2, 2]
    assert "CRITICAL" not in (tmp_path / "redis.log").read_text()


@pytest.mark.parametrize("caller", SCRIPTS)
def test_user_may_call_every_command_of_its_scripts(caller: str) -> None:
    texts = [
        path.read_text()
        for folder in SCRIPTS[caller]
        for path in (
            *(REPOSITORY / folder).glob("*.py"),
            *(REPOSITORY / folder / "lua").glob("*.lua"),
        )
        if caller == "batcher" or path.stem != "register_batcher"
    ]
    called = {
        command.lower()
        for text in texts
        for command in re.findall(r"(?:call|sliced|write|write_each)\(['\"]([A-Z]+)['\"]", text)
    } - {"entry", "extend", "cut"}  # words of `leader_write`

    assert len(called) >= 9
    assert called - allowed_of(caller.partition(" ")[0]) == set()


def test_passwords_are_made_once_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    users = REPOSITORY / "deploy/redis/users.sh"

    def run() -> tuple[dict[str, str], str]:
        acl = tmp_path / "users.acl"
        subprocess.run(["sh", users, tmp_path / "secrets", acl], check=True)
        files = {each: tmp_path / "secrets" / each / "password" for each in USERS}
        assert {stat.S_IMODE(path.stat().st_mode) for path in (acl, *files.values())} == {0o600}
        return {user: path.read_text() for user, path in files.items()}, acl.read_text()

    first, written = run()
    second, written_again = run()
    (tmp_path / "secrets/trainer/password").unlink()
    third, _ = run()

    assert (first, written) == (second, written_again)
    assert {len(each) for each in first.values()} == {64}
    assert len(set(first.values())) == len(USERS)
    assert [password for password in first.values() if password in written] == []
    assert [user for user in USERS if third[user] != first[user]] == ["trainer"]


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_configuration_for_debian_is_a_store_with_password_and_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server is installed")
    page = (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8")
    text = page.partition("```conf\n")[2].partition("```")[0]
    certificate, _ = make_certificate(tmp_path)
    port = free_port()
    for place in ("/etc/redis/tls", "/var/lib/redis"):
        text = text.replace(place, str(tmp_path))
    (tmp_path / "turnstream.conf").write_text(text.replace("6379", str(port)))
    (tmp_path / "store.password").write_text("change-me\n")
    url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}"

    with subprocess.Popen([binary, tmp_path / "turnstream.conf"], stdout=subprocess.DEVNULL) as it:
        try:
            wait_until(lambda: listens(port), describe="the server")
            with pytest.raises(redis.AuthenticationError), connect(url, num_retries=0) as client:
                client.ping()
            monkeypatch.setenv("TURNSTREAM_REDIS_PASSWORD_FILE", str(tmp_path / "store.password"))
            turnstream.connect(url).create_run("demo", batch_groups=1)
            with connect(url.replace("//", "//:change-me@")) as client:
                facts: Any = {**client.info("memory"), **client.info("persistence")}
        finally:
            it.kill()

    assert facts["maxmemory_policy"] == "noeviction"
    assert (facts["maxmemory"], facts["aof_enabled"]) == (16 << 30, 1)
