"""The calls of a service and its runs, over the JSON routes of a gateway.

The path of a call has the id of its run, such as `maze~1`: another run may have the name by now.
Arguments are checked here as over Redis, so that a wrong one has the same error.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from turnstream.batching.config import BatchingConfig
from turnstream.errors import NotReadyError, WaitReason
from turnstream.http.client import GatewayClient
from turnstream.http.problems import error_of, reasons_of
from turnstream.records.configs import decode_config, encode_config
from turnstream.store.client.addresses import address_of
from turnstream.store.client.deadlines import SOCKET_TIMEOUT_S
from turnstream.store.client.run_ids import no_such_run
from turnstream.store.run.batchers import ANSWER_S, required
from turnstream.store.run.configs import check_step
from turnstream.store.run.credits import Credit, CreditReason
from turnstream.store.run.rewards import RewardOutcome, encode_reward
from turnstream.store.run.runs import check_leftover
from turnstream.store.run.tasks import Prompt, check_samples, checked_prompts
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.types import Leftover, TrajectoryKey, VersionAnnounced
from turnstream.types.names import RunId, checked_run_name, checked_setting, encode_run

AGENTS: Final = "/openai/v1"
"""First characters of the paths of agents."""

_MAX_PROMPTS: Final = 8_192
"""Prompts of one request, at most."""

_PAGE_BYTES: Final = 1_000_000
"""JSON of the prompts of one request, above which the next request begins."""


class GatewayCalls:
    """The calls to the gateway at `url`; the first one connects."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = GatewayClient(url)

    def ping(self) -> None:
        """Check that the gateway and its store answer, and that the key is accepted."""
        self._client.get("/ping")

    def close(self) -> None:
        """Disconnect; a later call connects again."""
        self._client.close()

    def create_run(self, name: str, config: BatchingConfig) -> RunId:
        """Create a run, or find the run with this config; return its id."""
        encode_run(checked_run_name(name))
        content = {"name": name, "settings": _settings(config)}
        return RunId(self._client.post("/runs", content)["run"])

    def find_run(self, name: str) -> RunId:
        """Return the id of the run that has this name now."""
        return RunId(self._client.get(f"{run_path(name)}/config")["run"])

    def list_runs(self) -> list[RunId]:
        """Return the ids of all runs that the key may use, sorted."""
        found: list[RunId] = []
        next_run: str | None = ""
        while next_run is not None:
            page = self._client.get("/runs", from_run=next_run)
            found += [RunId(each["run"]) for each in page["runs"]]
            next_run = page["next_run"]
        return found

    def config(self, run: RunId) -> BatchingConfig:
        """Return the settings in force."""
        found = self._client.get(f"{run_path(run)}/config")
        return decode_config(json.dumps(found["settings"]), run=run)

    def revise(self, run: RunId, config: BatchingConfig, *, from_step: int) -> int:
        """Change the settings from a step on; return the number of the revision."""
        check_step(from_step)
        content = {"from_step": from_step, "settings": _settings(config)}
        return int(
            self._client.call("PATCH", f"{run_path(run)}/config", content=content)["revision"]
        )

    def credit(self, run: RunId) -> Credit:
        """Return how many groups may start now."""
        found = self._client.get(f"{run_path(run)}/credit")
        reason = found["reason"]
        return Credit(
            num_groups=found["num_groups"],
            most=found["most"],
            reason=None if reason is None else CreditReason(reason),
            sentence=found["sentence"],
        )

    def pause(self, run: RunId, reason: str) -> bool:
        """Pause a run; return whether that is new."""
        return self._changed(run, "pause", reason=checked_setting(reason, field="reason"))

    def resume(self, run: RunId) -> bool:
        """End the pause of a run; return whether there was one."""
        return self._changed(run, "resume")

    def close_run(self, run: RunId, reason: str, *, leftover: Leftover) -> bool:
        """Close a run to new groups; return whether that is new."""
        check_leftover(leftover)
        reason = checked_setting(reason, field="reason")
        return self._changed(run, "close", reason=reason, leftover=leftover)

    def reopen(self, run: RunId) -> bool:
        """Reopen a run; return whether it was closed."""
        return self._changed(run, "reopen")

    def add_prompts(self, run: RunId, prompts: Sequence[Prompt], *, first: int | None) -> int:
        """Add prompts, in several requests where they are many; return the number ever added."""
        listed, first = checked_prompts(prompts, first=first)
        check_samples(listed, most=self.config(run).max_samples)
        path = f"{run_path(run)}/prompts"
        number = first or self._client.post(path, {"prompts": []})["num_added"] + 1
        num_added = 0
        for page in _pages(listed):
            answer = self._client.post(path, {"first": number, "prompts": page})
            num_added = int(answer["num_added"])
            number += len(page)
        return num_added

    def post_reward(
        self,
        run: RunId,
        key: TrajectoryKey,
        reward: float | None,
        *,
        reward_components: Mapping[str, float] | None,
    ) -> RewardOutcome:
        """Post the reward of a trajectory."""
        encode_reward(key, reward, reward_components)  # checks the arguments
        item: dict[str, Any] = {
            "group_id": key.group_id,
            "sample": int(key.sample),
            "attempt": int(key.attempt),
            "reward": None if reward is None else float(reward),
            "reward_components": {k: float(v) for k, v in (reward_components or {}).items()},
        }
        (result,) = self._client.post(f"{run_path(run)}/rewards", {"items": [item]})["results"]
        if (problem := result.get("problem")) is not None:
            raise error_of(problem)
        return RewardOutcome[result["outcome"].upper()]

    def newest_version(self, run: RunId) -> VersionAnnounced | None:
        """Return the highest announced version; None before the first."""
        newest = self._client.get(f"{run_path(run)}/versions", limit=1)["newest"]
        return None if newest is None else _announced(newest)

    def wait_for_version(self, run: RunId, *, above: int, timeout_s: float) -> VersionAnnounced:
        """Return the newest version, once it is higher than `above`; one request is held."""
        what = f"run {run!r}: no version above {above}"
        wait = StoreWait(address_of(self._url), "version", what, wait_s=timeout_s)
        while True:
            with wait.answering() as left_s:
                held_s = wait.block_ms / 1000  # the gateway holds the request for so long
                limit_s = min(left_s, held_s + SOCKET_TIMEOUT_S)
                query = {"above": above, "limit": 1, "wait_s": held_s}
                path = f"{run_path(run)}/versions"
                found = self._client.call("GET", path, query=query, limit_s=limit_s)
            if found["versions"]:
                return _announced(found["newest"])
            wait.note_answer(f"no version above {above} was announced")
            if wait.has_timed_out:
                reasons = reasons_of(found.get("reasons"))
                raise NotReadyError(wait.message, [_waited(each, timeout_s) for each in reasons])

    def batchers(self) -> Callable[[], list[str]]:
        """Return a function that reads the addresses of all batchers."""
        return self._registered_batchers

    def _registered_batchers(self) -> list[str]:
        with contextlib.closing(
            GatewayClient(self._url, num_retries=0, silent_s=ANSWER_S)
        ) as client:
            found = [str(each) for each in client.get("/batchers")["batchers"]]
        return required(found, where=f"the gateway {address_of(self._url)}")

    def _changed(self, run: RunId, change: str, **content: str) -> bool:
        return bool(self._client.post(f"{run_path(run)}/{change}", content or None)["changed"])


def new_session(url: str, run: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Make a session key at the gateway of this address; return the answer."""
    with contextlib.closing(GatewayClient(url)) as client:
        return client.post(f"{run_path(run)}/sessions", content)


def end_session(url: str, content: Mapping[str, Any]) -> None:
    """Seal or abandon the trajectory of the session key in this address of a gateway."""
    with contextlib.closing(GatewayClient(url, prefix=AGENTS)) as client:
        client.post("/session/end", content)


def run_path(run: str) -> str:
    """Return the path of a run below `/v1`; a RunId stands for its id, any other text for a name.

    >>> run_path("a/b"), run_path(RunId("maze")), run_path(RunId("maze~2"))
    ('/runs/a%2Fb', '/runs/maze~1', '/runs/maze~2')
    """
    encode_run(run)
    if run in (".", ".."):  # they have no path, and no run has such a name
        raise no_such_run(run)
    name = f"{run.name}~{run.incarnation}" if isinstance(run, RunId) else run
    return f"/runs/{quote(name, safe='')}"


def _settings(config: BatchingConfig) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(encode_config(config))
    del settings["format"]
    return settings


def _pages(prompts: Sequence[Prompt]) -> Iterator[list[dict[str, Any]]]:
    """Yield the prompts of one request each; at least one page, which may be empty."""
    page: list[dict[str, Any]] = []
    num_bytes = 0
    for prompt in prompts:
        fields = {
            "prompt_uid": prompt.prompt_uid,
            "payload": base64.b64encode(prompt.payload).decode(),
            "num_samples": prompt.num_samples,
            "num_needed": prompt.num_needed,
        }
        size = len(fields["payload"]) + 6 * len(prompt.prompt_uid)
        if page and (len(page) == _MAX_PROMPTS or num_bytes + size > _PAGE_BYTES):
            yield page
            page, num_bytes = [], 0
        page.append(fields)
        num_bytes += size
    yield page


def _announced(version: dict[str, Any]) -> VersionAnnounced:
    return VersionAnnounced(
        version=version["version"],
        step=version["step"],
        lineage=version["lineage"],
        weights_uri=version["weights_uri"],
    )


def _waited(reason: WaitReason, waited_s: float) -> WaitReason:
    """Return a reason with the length of the whole wait in place of that of its last request."""
    if reason.facts.get("awaited") != "version":
        return reason
    return reason._replace(facts={**reason.facts, "waited_s": waited_s})
