"""Records of saved checkpoints: read by their owners, expired, deleted and saved again."""

from __future__ import annotations

from typing import Any

import pytest

from testkit import wait_until
from testkit.runs.command_logs import BASE, CommandLogs
from turnstream.errors import RunNotFoundError
from turnstream_server.operations import checkpoints
from turnstream_server.operations.checkpoints import (
    CheckpointPath,
    SavedCheckpoint,
    checkpoints_of,
    delete_checkpoint,
    due_folders,
    folder_of,
    folder_removed,
    read_checkpoint,
    write_checkpoint,
)
from turnstream_server.operations.keys import (
    EXPIRIES,
    owner_keys,
)


def _saved(logs: CommandLogs, name: str = "a", **changes: Any) -> SavedCheckpoint:
    saved = SavedCheckpoint(
        path=CheckpointPath("S:train:0", "weights", name),
        request_id="S:train:0:4",
        base_model=BASE,
        lora_rank=4,
        train_attn=True,
        train_mlp=True,
        train_unembed=False,
        created_ms=_now_ms(logs),
        expires_ms=None,
        size_bytes=10,
        user_metadata={"a": "b"},
    )
    return saved._replace(**changes)


def _now_ms(logs: CommandLogs) -> int:
    seconds: Any = logs.client.time()
    return seconds[0] * 1000 + seconds[1] // 1000


@pytest.fixture
def owner(logs: CommandLogs, request: pytest.FixtureRequest) -> str:
    """An owner of this test alone; nothing is due."""
    logs.client.delete(EXPIRIES)
    return f"owner-{request.node.name}"


def test_checkpoint_is_read_back_by_its_owner_alone(logs: CommandLogs, owner: str) -> None:
    one, two = _saved(logs), _saved(logs, "b é", created_ms=1)
    for each in (one, two):
        write_checkpoint(logs.client, owner, each)

    assert read_checkpoint(logs.client, owner, one.path) == one
    assert read_checkpoint(logs.client, owner, two.path) == two
    assert checkpoints_of(logs.client, owner) == [two, one]
    assert checkpoints_of(logs.client, owner, model_id="S:train:1") == []
    with pytest.raises(RunNotFoundError, match="no checkpoint 'tinker://S:train:0/weights/a'"):
        read_checkpoint(logs.client, "other", one.path)
    assert due_folders(logs.client) == []


@pytest.mark.both_servers
def test_expired_checkpoint_is_hidden_and_its_folder_is_due(logs: CommandLogs, owner: str) -> None:
    saved = _saved(logs, expires_ms=_now_ms(logs) + 100)
    write_checkpoint(logs.client, owner, saved)
    assert due_folders(logs.client) == []

    wait_until(lambda: not checkpoints_of(logs.client, owner))

    with pytest.raises(RunNotFoundError):
        read_checkpoint(logs.client, owner, saved.path)
    ((entry, folder),) = due_folders(logs.client)
    assert folder == folder_of(saved.path)
    assert due_folders(logs.client) == [(entry, folder)]  # until it is removed
    folder_removed(logs.client, entry)
    assert due_folders(logs.client) == []
    assert logs.client.exists(owner_keys(owner).checkpoints) == 0


def test_changed_expiry_replaces_the_old_one(logs: CommandLogs, owner: str) -> None:
    saved = _saved(logs, expires_ms=_now_ms(logs) + 50)
    write_checkpoint(logs.client, owner, saved)
    later = saved._replace(expires_ms=_now_ms(logs) + 3_600_000, public=True)

    write_checkpoint(logs.client, owner, later)
    wait_until(lambda: _now_ms(logs) > (saved.expires_ms or 0))

    assert due_folders(logs.client) == []
    assert read_checkpoint(logs.client, owner, saved.path) == later
    kept = later._replace(expires_ms=None)
    write_checkpoint(logs.client, owner, kept)
    assert logs.client.zcard(EXPIRIES) == 0
    assert read_checkpoint(logs.client, owner, saved.path) == kept


@pytest.mark.parametrize("expires_in_ms", [None, 3_600_000])
def test_checkpoint_saved_again_while_its_deletion_is_due_stays(
    logs: CommandLogs, owner: str, expires_in_ms: int | None
) -> None:
    saved = _saved(logs)
    write_checkpoint(logs.client, owner, saved)
    delete_checkpoint(logs.client, owner, saved.path)
    with pytest.raises(RunNotFoundError):
        delete_checkpoint(logs.client, owner, saved.path)
    assert [folder for _, folder in due_folders(logs.client)] == [folder_of(saved.path)]

    expires_ms = None if expires_in_ms is None else _now_ms(logs) + expires_in_ms
    again = saved._replace(request_id="S:train:0:9", expires_ms=expires_ms)
    write_checkpoint(logs.client, owner, again)

    assert due_folders(logs.client) == []
    assert read_checkpoint(logs.client, owner, saved.path) == again
    assert logs.client.zcard(EXPIRIES) == (expires_ms is not None)


def test_due_folder_of_a_kept_checkpoint_is_due_at_its_expiry(
    logs: CommandLogs, owner: str
) -> None:
    # A worker that read a due entry must not drop the expiry that was written at the same time.
    saved = _saved(logs, expires_ms=_now_ms(logs) + 3_600_000)
    write_checkpoint(logs.client, owner, saved)
    entry = f"{owner} {saved.path}"
    logs.client.zadd(EXPIRIES, {entry: 0})

    assert due_folders(logs.client) == []

    assert logs.client.zscore(EXPIRIES, entry) == saved.expires_ms


@pytest.mark.parametrize("was_deleted", [False, True])
def test_checkpoint_saved_again_by_another_worker_stays(
    logs: CommandLogs, owner: str, monkeypatch: pytest.MonkeyPatch, was_deleted: bool
) -> None:
    saved = _saved(logs, expires_ms=1)
    again = saved._replace(request_id="S:train:0:9", expires_ms=None)
    logs.client.zadd(EXPIRIES, {f"{owner} {saved.path}": 0})
    if not was_deleted:
        write_checkpoint(logs.client, owner, saved)
    drop = checkpoints._DROP

    def save_and_drop(*args: Any) -> Any:
        write_checkpoint(logs.client, owner, again)
        return drop(*args)

    monkeypatch.setattr(checkpoints, "_DROP", save_and_drop)

    assert due_folders(logs.client) == []
    assert read_checkpoint(logs.client, owner, saved.path) == again
