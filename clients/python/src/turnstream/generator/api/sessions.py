"""Sessions of agents: the gateway stores the model calls of an unmodified program as turns."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Self, TypeVar

from turnstream.errors import (
    ConflictError,
    InvalidConfigError,
    InvalidTurnError,
    RejectedError,
    TurnstreamError,
)
from turnstream.generator.api.trajectory_core import reason_of, warn_unsealed
from turnstream.generator.encode.group_checks import (
    checked_key,
    checked_metrics,
    checked_reward,
    checked_status,
    checked_tags,
)
from turnstream.optional import from_extra
from turnstream.store.client.addresses import checked_url, is_http, with_key, without_key
from turnstream.types import GroupOpened, Purpose, Status, TrajectoryKey
from turnstream.types.names import checked_text, flag, named_numbers, quoted, whole_number

GATEWAY_VARIABLE: Final = "TURNSTREAM_GATEWAY_URL"

_SIBLINGS: Final = ("train", "mask", "refuse")
_LIMITS: Final = ("max_calls", "max_tokens", "expires_in_s")

_logger = logging.getLogger(__name__)


class AgentSessionBase:
    """The trajectory of one agent, whose model calls the gateway stores.

    Attributes:
        key: the session key; a secret of this trajectory alone.
        environment: OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY.
        trajectory: its name in the run.
        expires_ms: server ms from which on the key is refused.
    """

    def __init__(
        self, url: str, trajectory: TrajectoryKey, made: Mapping[str, Any], *, seal_key: str
    ) -> None:
        self.key: str = made["key"]
        self.environment: dict[str, str] = dict(made["environment"])
        self.expires_ms: int = made["expires_ms"]
        self.trajectory = trajectory
        self._own_url = with_key(without_key(url), seal_key)
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        """Whether it was sealed or abandoned here."""
        return self._has_ended

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.trajectory.readable_name!r})"

    def _end(self, content: Mapping[str, Any]) -> None:
        if self._has_ended:
            raise RejectedError(f"session {self.trajectory.readable_name} is sealed or abandoned")
        from turnstream.http.gateway_calls import end_session

        end_session(self._own_url, content)
        self._has_ended = True

    def _abandon(self, reason: str) -> None:
        self._end({"abandon": checked_text(reason, field="reason")})

    def _leave(self, error: BaseException | None) -> None:
        """Abandon the trajectory, unless it is sealed, also by the agent."""
        if self._has_ended:
            return
        try:
            self._abandon(reason_of(error).encode(errors="replace").decode())
        except ConflictError as refusal:
            _logger.debug("session %s: %s", self.trajectory.readable_name, refusal)
        except TurnstreamError as failure:
            if error is None:
                raise
            _logger.warning(
                "session %s was not abandoned: %s", self.trajectory.readable_name, failure
            )
        else:
            if error is None:
                warn_unsealed(self.trajectory.group_id, [self.trajectory.sample])


class AgentSession(AgentSessionBase):
    """The trajectory of one agent; a context manager. Made by `GroupWriter.session`.

    Leaving it by an exception, or without a seal, abandons the trajectory. The agent itself may
    have sealed it. A session outlives its publisher, and any thread may use it.
    """

    def seal(
        self,
        reward: float | None = None,
        *,
        reward_components: Mapping[str, float] | None = None,
        status: Status | str | None = None,
        sampling: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        awaits_reward: bool = False,
        siblings: str | None = None,
    ) -> None:
        """End the trajectory and wait until the run has recorded it.

        Args:
            reward: see `TrajectoryWriter.seal`, as for the other arguments.
            reward_components: named rewards.
            status: how the episode ended; None takes the status of the last call.
            sampling: parameters such as temperature.
            tags: labels.
            metrics: finite numbers.
            awaits_reward: the reward will be posted by `post_reward`.
            siblings: calls that no later call continues, while another answer to the same prompt is
                continued: "mask" stores them untrained, "train" trains them, "refuse" refuses the
                seal. None takes the default of the gateway.

        Raises:
            InvalidTurnError: a value is wrong.
            RejectedError: the trajectory has ended.
            UnknownKeyError: the session has expired, or its API key is revoked.
            StoreUnavailableError: the gateway did not answer; the call may be repeated.
        """
        self._end(
            _seal_fields(
                reward=reward,
                reward_components=reward_components,
                status=status,
                sampling=sampling,
                tags=tags,
                metrics=metrics,
                awaits_reward=awaits_reward,
                siblings=siblings,
            )
        )

    def abandon(self, reason: str) -> None:
        """Abandon the trajectory: none of it is trained. Errors as of `seal`."""
        self._abandon(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._leave(error)


class AsyncAgentSession(AgentSessionBase):
    """The same as `AgentSession`, made by `AsyncGroupWriter.session`."""

    async def seal(
        self,
        reward: float | None = None,
        *,
        reward_components: Mapping[str, float] | None = None,
        status: Status | str | None = None,
        sampling: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        awaits_reward: bool = False,
        siblings: str | None = None,
    ) -> None:
        """End the trajectory and wait until the run has recorded it. See `AgentSession.seal`."""
        fields = _seal_fields(
            reward=reward,
            reward_components=reward_components,
            status=status,
            sampling=sampling,
            tags=tags,
            metrics=metrics,
            awaits_reward=awaits_reward,
            siblings=siblings,
        )
        await asyncio.to_thread(self._end, fields)

    async def abandon(self, reason: str) -> None:
        """Abandon the trajectory: none of it is trained. See `AgentSession.abandon`."""
        await asyncio.to_thread(self._abandon, reason)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await asyncio.to_thread(self._leave, error)


_Session = TypeVar("_Session", bound=AgentSessionBase)


class SessionMaker:
    """Makes the sessions of the groups of one publisher.

    `url` is the address of its store or gateway; `find_run` returns the id of its run.
    """

    def __init__(self, url: str, find_run: Callable[[], Awaitable[str]]) -> None:
        self._url = url
        self._find_run = find_run

    async def make(
        self,
        kind: type[_Session],
        group: GroupOpened,
        *,
        sample: int,
        attempt: int,
        gateway: str | None,
        policy: str,
        may_seal: bool,
        **limits: int | None,
    ) -> _Session:
        """Return a session of a sample that is not open yet; errors as of `GroupWriter.session`."""
        url = gateway_of(self._url, gateway)
        if group.purpose is not Purpose.TRAIN or group.num_needed != group.num_samples:
            field = "purpose" if group.purpose is not Purpose.TRAIN else "num_needed"
            text = "a session is of a group that trains, and needs all of its samples"
            raise InvalidTurnError(field, text)
        named = TrajectoryKey(group.group_id, sample, attempt)
        key = checked_key(named, num_samples=group.num_samples)
        content: dict[str, Any] = {
            **key._asdict(),
            "num_samples": group.num_samples,
            "prompt_uid": group.prompt_uid,
            "policy": checked_text(policy, field="policy"),
            "may_seal": flag(may_seal, field="may_seal"),
        }
        for name in _LIMITS:
            if (value := limits[name]) is not None:
                content[name] = whole_number(value, field=name, least=1, limit=2**53)
        with from_extra("http", needed_by="session()"):
            from turnstream.http.gateway_calls import new_session
        run = await self._find_run()
        made = await asyncio.to_thread(new_session, url, run, content)
        seal_key: str = made["key"]
        if not may_seal:  # the agent gets a key without this right, and the session has it
            whole = {**content, "may_seal": True}
            seal_key = (await asyncio.to_thread(new_session, url, run, whole))["key"]
        return kind(url, key, made, seal_key=seal_key)


def gateway_of(url: str, given: str | None) -> str:
    """Return the gateway of sessions: the given one, else that of the publisher, else the setting.

    >>> gateway_of("redis://localhost:7379", "http://10.0.0.7:7601")
    'http://10.0.0.7:7601'
    """
    if given is None and is_http(url):
        return url
    field = "gateway" if given is not None else GATEWAY_VARIABLE
    found = os.environ.get(GATEWAY_VARIABLE, "") if given is None else given
    if not found:
        raise InvalidConfigError(
            "gateway",
            "a session needs the address of a gateway: pass gateway='http://HOST:PORT', or set "
            f"{GATEWAY_VARIABLE}",
        )
    if not is_http(checked_url(found, field=field)):
        raise InvalidConfigError(field, f"{quoted(found)} is a store, expected http://HOST:PORT")
    return found


def _seal_fields(
    *,
    reward: float | None,
    reward_components: Mapping[str, float] | None,
    status: Status | str | None,
    sampling: Mapping[str, float] | None,
    tags: Mapping[str, str] | None,
    metrics: Mapping[str, float] | None,
    awaits_reward: bool,
    siblings: str | None,
) -> dict[str, Any]:
    """Return the body of a seal, with the fields that are given."""
    awaits_reward = flag(awaits_reward, field="awaits_reward")
    if siblings not in (None, *_SIBLINGS):
        raise InvalidTurnError(
            "siblings", f"{quoted(siblings)} is not one of {', '.join(_SIBLINGS)}"
        )
    fields: dict[str, Any] = {
        "reward": checked_reward(reward, awaits_reward=awaits_reward),
        "reward_components": named_numbers(reward_components, field="reward_components") or None,
        "status": None if status is None else checked_status(status).value,
        "sampling": named_numbers(sampling, field="sampling") or None,
        "tags": checked_tags(tags) or None,
        "metrics": checked_metrics(metrics) or None,
        "awaits_reward": awaits_reward or None,
        "siblings": siblings,
    }
    return {name: value for name, value in fields.items() if value is not None}
