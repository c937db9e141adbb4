"""Scripts that may be called over HTTP, each with its roles, keys and check of arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from turnstream.errors import AccessDeniedError
from turnstream.store.client.keys import (
    incarnation_key,
    run_keys,
    run_of,
    trajectory_keys,
)
from turnstream.store.client.scripts import Script
from turnstream.types.names import shown
from turnstream_server.gateway.rest.commands import arguments
from turnstream_server.gateway.rest.commands.arguments import ArgumentCheck, Place, trajectory
from turnstream_server.keys.records import Role

ANY: Final[tuple[Role, ...]] = ("read", "produce", "train")
"""Roles for what every user of a run needs."""

_PRODUCE: Final[tuple[Role, ...]] = ("produce",)
_ADMIN: Final[tuple[Role, ...]] = ("admin",)

_RUN: Final = "turnstream.store.run"
_OUTBOX: Final = "turnstream.generator.outbox"
_WAITS: Final = "turnstream.store.waits"

PAYLOAD: Final = ("turns", "meta")
"""Names of the keys of a trajectory's payload."""


class AllowedScript(NamedTuple):
    """A script that may be called.

    Attributes:
        script: the script.
        roles: roles of which a key needs one.
        key_names: names of its keys, in order: those of RunKeys, or PAYLOAD.
        check: check of its arguments.
    """

    script: Script
    roles: tuple[Role, ...]
    key_names: tuple[str, ...]
    check: ArgumentCheck

    def place_of(self, keys: Sequence[str]) -> Place:
        """Return the place that the keys of a call name.

        Raises:
            AccessDeniedError: they are not the keys of this script for one run.
        """
        with contextlib.suppress(ValueError, IndexError):
            run = run_of(keys[0])
            if self.key_names == PAYLOAD:
                name = keys[0].partition("/")[2].partition("}")[0]
                if tuple(keys) == trajectory_keys(run, name):
                    return Place(run, trajectory(name.encode()))
            elif tuple(keys) == tuple(key_of(run, each) for each in self.key_names):
                return Place(run)
        raise AccessDeniedError(
            f"the keys of script {self.script.name} are {shown([*keys])}, expected "
            f"{', '.join(self.key_names)} of one run"
        )


def key_of(run: str, name: str) -> str:
    """Return the key of a run with this name.

    >>> key_of("maze~2", "config"), key_of("maze~2", "incarnation")
    ('ts:{maze}~2:config', 'ts:{maze}:incarnation')
    """
    return incarnation_key(run) if name == "incarnation" else getattr(run_keys(run), name)


def _allowed(
    name: str, package: str, roles: tuple[Role, ...], key_names: str, check: ArgumentCheck
) -> AllowedScript:
    return AllowedScript(Script(name, package), roles, tuple(key_names.split()), check)


_OPEN_GROUP_KEYS: Final = (
    "frontier config groups ledger counts events wake leases deadlines members refills over held "
    "budget clock leader prompts tasks again"
)
_NEXT_TASK_KEYS: Final = (
    "prompts tasks again frontier config groups ledger wake members refills over"
)
_POST_SEALED_KEYS: Final = "ledger counts groups events leases deadlines config held budget clock"
_POST_REWARD_KEYS: Final = "ledger counts rewards deadlines events conflicts frontier groups over"
_READ_WAITS_KEYS: Final = (
    "frontier config leader budget prompts again leases ledger refills versions counts deadlines "
    "clock times ranks events wake"
)

SCRIPTS: Final = (
    # Generators.
    _allowed("append", _OUTBOX, _PRODUCE, "turns meta", arguments.of_append),
    _allowed("post_sealed", _OUTBOX, _PRODUCE, _POST_SEALED_KEYS, arguments.of_post_sealed),
    _allowed("abandon", _OUTBOX, _PRODUCE, "ledger counts events leases", arguments.of_abandon),
    _allowed("note_conflict", _OUTBOX, _PRODUCE, "conflicts", arguments.of_note_conflict),
    _allowed("open_group", _RUN, _PRODUCE, _OPEN_GROUP_KEYS, arguments.of_open_group),
    _allowed("reserve", _RUN, _PRODUCE, "ledger held budget", arguments.of_reserve),
    _allowed("heartbeat", _RUN, _PRODUCE, "ledger leases config", arguments.of_heartbeat),
    _allowed("adopt", _RUN, _PRODUCE, "ledger leases config groups", arguments.of_adopt),
    _allowed("list_lapsed", _RUN, _PRODUCE, "ledger leases config", arguments.of_list_lapsed),
    _allowed("read_group", _RUN, _PRODUCE, "frontier groups ledger over", arguments.of_read_group),
    _allowed("next_task", _RUN, _PRODUCE, _NEXT_TASK_KEYS, arguments.of_next_task),
    _allowed("post_reward", _RUN, _PRODUCE, _POST_REWARD_KEYS, arguments.of_post_reward),
    # Everybody.
    _allowed("read_config", _RUN, ANY, "config", arguments.no_arguments),
    _allowed("read_waits", _WAITS, ANY, _READ_WAITS_KEYS, arguments.of_read_waits),
    # Operators.
    _allowed(
        "create_run",
        _RUN,
        _ADMIN,
        "frontier config counts clock incarnation",
        arguments.of_create_run,
    ),
    _allowed("revise_config", _RUN, _ADMIN, "frontier config wake", arguments.of_revise_config),
    _allowed("set_closed", _RUN, _ADMIN, "frontier events wake", arguments.of_set_closed),
    _allowed("set_paused", _RUN, _ADMIN, "frontier wake", arguments.of_set_paused),
    _allowed("add_prompts", _RUN, _ADMIN, "frontier prompts wake", arguments.of_add_prompts),
)
"""Every other script is refused: those of batchers, of hosted models, and of deletions."""

BY_SHA: Final[Mapping[bytes, AllowedScript]] = {each.script.sha.encode(): each for each in SCRIPTS}
