"""Rewards that are posted after the seal, by whatever process knows them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import redis

from turnstream.errors import InvalidTurnError
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.run_ids import find_run
from turnstream.store.client.scripts import Command, Script, run_command
from turnstream.types import RewardPosted, TrajectoryKey
from turnstream.types.names import checked_text, finite_number, named_numbers, quoted, whole_number

POST_REWARD: Final = Script("post_reward", "turnstream.store.run")

LEFT: Final = b"LEFT"
"""Reply for a trajectory that has left the ledger. Its reward may have been posted before."""

_NUMBER_LIMIT: Final = 2**31


class RewardOutcome(StrEnum):
    """The outcome of a posted reward."""

    POSTED = "OK"
    DUPLICATE = "DUPLICATE"
    LATE = "LATE"


def post_reward(
    client: redis.Redis,
    run: str,
    key: TrajectoryKey,
    reward: float | None = None,
    *,
    reward_components: Mapping[str, float] | None = None,
) -> RewardOutcome:
    """Post the reward of a trajectory sealed with `awaits_reward`; a repeat changes nothing.

    Args:
        client: client of the store.
        run: name or id of the run; see `turnstream.store.client.run_ids.find_run`.
        key: the trajectory.
        reward: its outcome reward.
        reward_components: named rewards; they are added to those of the seal, and replace equal
            names.

    Returns:
        LATE if its group was decided before: it is counted and changes nothing. A DUPLICATE is
        known while the ledger has the trajectory; later rewards are LATE.

    Raises:
        InvalidTurnError: there is no reward, it is not finite, or a name is invalid.
        ConflictError: another reward was posted; or the trajectory was never opened, is not sealed
            yet, or was sealed with its reward.
        RunNotFoundError: no such run, or it was deleted.
        StoreUnavailableError: the store cannot be reached.
    """
    posted = encode_reward(key, reward, reward_components)  # checks before it asks
    return outcome_of(run_command(client, post_reward_command(find_run(client, run), *posted)))


def outcome_of(reply: bytes) -> RewardOutcome:
    """Return the outcome in a reply of the script.

    >>> outcome_of(b"LEFT")
    <RewardOutcome.LATE: 'LATE'>
    """
    return RewardOutcome.LATE if reply == LEFT else RewardOutcome(reply.decode())


def encode_reward(
    key: TrajectoryKey, reward: float | None, reward_components: Mapping[str, float] | None
) -> tuple[str, bytes]:
    """Return the id of a trajectory, and the record of its reward.

    Errors are those of `post_reward`.
    """
    components = named_numbers(reward_components, field="reward_components")
    if reward is None and not components:
        raise InvalidTurnError("reward", "there is none, and no component")
    outcome = None if reward is None else finite_number(reward, field="reward")
    name = _trajectory_id(key)
    posted = RewardPosted(key=key, reward=outcome, reward_components=components)
    return name, encode_event(posted)


def post_reward_command(run: str, trajectory_id: str, record: bytes) -> Command:
    """Return the call that posts an encoded reward; nothing is sent."""
    return POST_REWARD(keys.run_keys(run).of_post_reward, trajectory_id, record[-4:].hex(), record)


def _trajectory_id(key: TrajectoryKey) -> str:
    if not isinstance(key, TrajectoryKey):
        raise InvalidTurnError("key", f"{quoted(key)} is not a TrajectoryKey")
    checked_text(key.group_id, field="group_id")
    for field in ("sample", "attempt"):
        whole_number(getattr(key, field), field=field, limit=_NUMBER_LIMIT)
    try:
        return keys.trajectory_id(key)
    except ValueError as error:
        raise InvalidTurnError("group_id", str(error)) from error
