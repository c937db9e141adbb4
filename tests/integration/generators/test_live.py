"""The live generator on a real store; the weights are announced as a trainer would."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import redis
import torch
from transformers import PreTrainedModel

import testkit
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from turnstream.batching.merge.merging import anchor_hash, turn_prompts
from turnstream.errors import InvalidConfigError, NotReadyError, StoreUnavailableError
from turnstream.store.client.connection import connect_async
from turnstream.store.run.runs import close_run
from turnstream.store.service_calls import StoreCalls
from turnstream.types import (
    GroupOpened,
    SealedTrajectory,
    StoredTurn,
    TrajectoryAbandoned,
    TrajectoryState,
    VersionAnnounced,
)
from turnstream.types.names import RunId
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.generators import live
from turnstream_server.generators.config import LiveGeneratorConfig
from turnstream_server.generators.guessing import VOCAB_SIZE, Episode, step
from turnstream_server.generators.live import NewestPolicy, generate
from turnstream_server.keys.store import create_key
from turnstream_server.ledger.queries.ledger import read_ledger
from turnstream_server.ledger.sessions.session_writes import TrainerRank
from turnstream_server.ledger.sessions.sessions import announce_version, start_session
from turnstream_server.models.policy import load_policy, save_policy
from turnstream_server.models.spec import SmallModelSpec
from turnstream_server.observed import run_check
from turnstream_server.settings import Settings
from turnstream_server.telemetry.readiness import store_check
from turnstream_server.trainer.publishing import serve_weights
from turnstream_server.waits import generator_url, wait_for_run


class LiveRun(NamedTuple):
    """A run whose trainer has announced its first weights."""

    url: str
    name: str
    client: redis.Redis
    folder: Path
    session_epoch: int

    def config(self, writer: str = "live", **fields: Any) -> LiveGeneratorConfig:
        """Return the settings of a generator of this run."""
        defaults = {"group_size": 2, "groups_per_round": 4, "timeout_s": 60.0}
        return LiveGeneratorConfig(
            redis_url=self.url, run=self.name, writer=writer, **{**defaults, **fields}
        )

    async def announce(self, version: int, *, seed: int) -> PreTrainedModel:
        """Publish weights of this seed."""
        model = load_policy(
            SmallModelSpec(vocab_size=VOCAB_SIZE, hidden_size=16, num_layers=1, seed=seed)
        )
        save_policy(model, self.folder / f"v{version}")
        uri = (self.folder / f"v{version}").as_uri()
        await self.say(version, uri=uri)
        return model

    async def say(self, version: int, *, uri: str) -> None:
        """Announce weights that lie at `uri`."""
        announced = VersionAnnounced(version=version, step=0, lineage="main", weights_uri=uri)
        async with connect_async(self.url) as client:
            await announce_version(client, self.name, TrainerRank(self.session_epoch), announced)

    @property
    def reader(self) -> RunReader:
        """Return the run as the store has it."""
        return RunReader(self.client, self.name)

    def events(self, kind: type) -> list[Any]:
        """Return all events of one kind, in order."""
        return [event for event in self.reader.events() if isinstance(event, kind)]

    def policy(self, calls: StoreCalls | None = None) -> NewestPolicy:
        """Return a policy that has no weights yet."""
        calls = calls or StoreCalls(self.url)
        return NewestPolicy(calls, RunId(self.name), cache=self.folder / "cache")

    def count(self, state: TrajectoryState) -> int:
        """Trajectories in this state."""
        return read_ledger(self.client, self.name).by_state[state]


@pytest.fixture
async def make_live_run(
    server: EmbeddedServer, client: redis.Redis, new_run: Callable[..., str], tmp_path: Path
) -> Callable[..., Any]:
    """Makes a run with a trainer session and nothing else; fields are those of its config."""
    torch.set_num_threads(1)

    async def make(**fields: Any) -> LiveRun:
        name = new_run(client, **fields)
        async with connect_async(server.url) as async_client:
            session = await start_session(
                async_client, name, session="s", dp_world_size=1, token=None
            )
        return LiveRun(server.url, name, client, tmp_path, session.session_epoch)

    return make


@pytest.fixture
async def live_run(make_live_run: Callable[..., Any]) -> LiveRun:
    """A run with room for two hundred groups."""
    return await make_live_run()


async def test_games_are_published_turn_by_turn_with_logprobs_version_and_outcome(
    live_run: LiveRun,
) -> None:
    model = await live_run.announce(3, seed=1)

    for _ in range(2):  # a restarted generator of the same name and seed makes new groups
        await generate(live_run.config(max_groups=3))

    sealed: list[SealedTrajectory] = live_run.events(SealedTrajectory)
    groups = {event.group_id: event for event in live_run.events(GroupOpened)}
    assert len(groups) == 6
    assert len(sealed) == 12
    for trajectory in sealed:
        secret = int(groups[trajectory.key.group_id].prompt_uid.removeprefix("secret-"))
        turns = live_run.reader.turns(trajectory.key)
        assert trajectory.reward == _replayed(turns, secret=secret)
        assert trajectory.oldest_version == trajectory.newest_version == 3
        assert trajectory.sampling == {"temperature": 1.0}
        prompts = [prompt.astype("<i4").tobytes() for prompt in turn_prompts(turns)]
        assert trajectory.anchors == tuple(anchor_hash(prompt) for prompt in prompts)
        _check_logprobs(model, turns)


async def test_generator_that_ends_in_its_games_abandons_them_and_says_why(
    live_run: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    await live_run.announce(0, seed=1)
    has_begun, may_end = threading.Event(), threading.Event()

    def sample_for_ever(*_: object, **__: object) -> list[object]:
        has_begun.set()
        may_end.wait(60)
        return []

    def fail(*_: object, **__: object) -> list[object]:
        raise StoreUnavailableError("the store went away")

    monkeypatch.setattr(live, "sample_tokens", sample_for_ever)
    generator = asyncio.create_task(generate(live_run.config()))
    await asyncio.to_thread(has_begun.wait, 60)
    generator.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await generator

    abandoned: list[TrajectoryAbandoned] = live_run.events(TrajectoryAbandoned)
    assert live_run.count(TrajectoryState.ABANDONED) == len(abandoned) == 8
    assert live_run.count(TrajectoryState.OPEN) == 0
    assert {"Cancelled" in event.reason for event in abandoned} == {True}
    monkeypatch.setattr(live, "sample_tokens", fail)
    with pytest.raises(StoreUnavailableError, match="went away"):
        await generate(live_run.config())


async def test_two_generators_above_capacity_do_not_block_each_other(
    make_live_run: Callable[..., Any],
) -> None:
    # Each of them got a part of the four groups, and waited with open groups for the rest.
    run: LiveRun = await make_live_run(batch_groups=4, max_staleness=0, max_planned_ahead=0)
    await run.announce(0, seed=1)
    generators = [
        asyncio.create_task(generate(run.config(writer, seed=number, groups_per_round=3)))
        for number, writer in enumerate(("one", "two"))
    ]

    await testkit.wait_until_async(lambda: run.count(TrajectoryState.SEALED) == 4 * 2)

    close_run(run.client, run.name)
    await asyncio.wait_for(asyncio.gather(*generators), timeout=60)
    ledger = read_ledger(run.client, run.name)
    ledger.check()
    assert ledger.by_state[TrajectoryState.SEALED] == ledger.accepted
    assert ledger.accepted == 2 * len(run.events(GroupOpened))


@pytest.mark.parametrize("place", ["file", "server"])
async def test_removed_weights_are_replaced_by_newer_ones(
    live_run: LiveRun, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    # The trainer had removed version 0 between the announcement and the loading of it.
    newest = await live_run.announce(1, seed=2)
    calls = StoreCalls(live_run.url)
    find = calls.newest_version
    with serve_weights(live_run.folder, listen="127.0.0.1:0") as server:
        base = server.url if place == "server" else live_run.folder.as_uri()
        found = [VersionAnnounced(version=0, step=0, lineage="", weights_uri=f"{base}/v0")]
        monkeypatch.setattr(
            calls, "newest_version", lambda run: found.pop() if found else find(run)
        )
        policy = live_run.policy(calls)

        policy.refresh()

    assert policy.version == 1
    assert _equal(policy.model, newest)


async def test_generator_keeps_its_weights_while_their_server_is_away(
    live_run: LiveRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "_FETCH_TIMEOUT_S", 0.2)
    kept = await live_run.announce(0, seed=1)
    policy = live_run.policy()
    policy.refresh()
    before = policy.model
    policy.refresh()
    assert policy.model is before
    assert _equal(before, kept)
    await live_run.say(1, uri="http://127.0.0.1:1/v1")

    policy.refresh()
    policy.refresh()  # the server is not asked again at once
    times_asked = caplog.text.count("weights 1 cannot be fetched")
    newest = await live_run.announce(2, seed=2)
    await asyncio.to_thread(
        testkit.wait_until, lambda: [policy.refresh(), policy.version == 2][1], 60.0, "version 2"
    )

    assert times_asked == 1
    assert not _equal(kept, newest)
    assert _equal(policy.model, newest)


async def test_unloadable_weights_are_refused_with_their_version(live_run: LiveRun) -> None:
    for version, uri in enumerate(("file:///nowhere/v7", "s3://bucket/v7", "")):
        await live_run.say(version, uri=uri)
        with pytest.raises(InvalidConfigError, match=rf"v7|version {version}"):
            live_run.policy().refresh()


async def test_generator_without_weights_stops_at_its_deadline(live_run: LiveRun) -> None:
    with pytest.raises(NotReadyError, match=r"no weights within 0\.05 s"):
        await generate(live_run.config(timeout_s=0.05))


@pytest.mark.redis
async def test_generator_over_http_plays_until_the_run_is_closed(
    live_run: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    await live_run.announce(0, seed=1)
    key_file = live_run.folder / "key"
    key_file.write_text(create_key(live_run.client, live_run.name, roles=["produce"]))
    monkeypatch.setenv("TURNSTREAM_KEY_FILE", str(key_file))
    monkeypatch.setenv("TURNSTREAM_REDIS_PASSWORD_FILE", str(live_run.folder / "of the store"))

    with GatewayThread(live_run.url, requires_key=True) as gateway:
        url = generator_url(Settings(), gateway.base_url)  # the missing file is not read
        assert store_check(url, durability="everysec")() == ""
        assert run_check(url, live_run.name)() == ""
        wait_for_run(url, live_run.name, timeout_s=5.0)
        config = replace(live_run.config(groups_per_round=2), redis_url=url)
        generator = asyncio.create_task(generate(config))
        await testkit.wait_until_async(
            lambda: live_run.count(TrajectoryState.SEALED) >= 8, describe="two rounds"
        )
        close_run(live_run.client, live_run.name)
        await asyncio.wait_for(generator, 60)

    ledger = read_ledger(live_run.client, live_run.name)
    assert ledger.by_state[TrajectoryState.SEALED] == ledger.accepted


def _replayed(turns: Sequence[StoredTurn], *, secret: int) -> float:
    """The outcome of the game when the stored responses are played again."""
    episode, context, reward = Episode(secret), [1], 0.0
    for index, turn in enumerate(turns):
        assert turn.parent_turn == index - 1
        context += turn.new_prompt_ids.tolist() if index else []
        response = turn.response_ids
        answer = step(episode, response)
        assert answer.is_done == (index == len(turns) - 1)
        if not answer.is_done:
            expected = turns[index + 1].new_prompt_ids
            assert expected.tolist() == answer.observation_ids.tolist()
        episode, reward = answer.episode, answer.reward
    return reward


def _check_logprobs(model: PreTrainedModel, turns: Sequence[StoredTurn]) -> None:
    context = np.empty(0, np.int32)
    for turn in turns:
        context = np.concatenate((context, turn.new_prompt_ids))
        with torch.no_grad():
            logits_V = model(input_ids=torch.from_numpy(context).long()[None]).logits[0, -1]
        (token,) = turn.response_ids.tolist()
        expected = torch.log_softmax(logits_V, dim=-1)[token].item()
        assert turn.logprobs is not None
        assert turn.logprobs.tolist() == pytest.approx([expected], abs=1e-4)
        context = np.concatenate((context, turn.response_ids))


def _equal(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)
