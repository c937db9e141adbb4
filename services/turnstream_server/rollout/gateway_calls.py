"""The calls of a rollout to its gateway. They block; `Caller` repeats them while it is away."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

from turnstream.errors import AccessDeniedError, NotReadyError, RejectedError, UnavailableError
from turnstream.http.client import GatewayClient
from turnstream.http.gateway_calls import AGENTS, GatewayCalls, end_session, new_session, run_path
from turnstream.store.client.addresses import with_key, without_key
from turnstream.store.client.backoff import pause_after
from turnstream.store.client.deadlines import SOCKET_TIMEOUT_S
from turnstream.store.run.tasks import Prompt
from turnstream.types import TrajectoryKey

_NUM_THREADS: Final = 32
_Result = TypeVar("_Result")


class TakenTask(NamedTuple):
    """A task whose trajectories are open for this rollout."""

    group_id: str
    prompt_uid: str
    num_samples: int
    payload: bytes
    trajectories: list[TrajectoryKey]

    def end_body(self, reason: str) -> dict[str, Any]:
        """Return the body that abandons what is open of it."""
        members = [{"sample": each.sample, "attempt": each.attempt} for each in self.trajectories]
        return {"group_id": self.group_id, "trajectories": members, "reason": reason}


class Facts(NamedTuple):
    """Stored calls of a session, and the reason of its last incomplete call."""

    num_turns: int
    last_incomplete: str


class RunCalls:
    """The calls for one run, from any thread. Errors are those of the SDK."""

    def __init__(self, url: str, run: str) -> None:
        self._url = url
        self._calls = GatewayCalls(url)
        self._client = GatewayClient(url)
        self.run = self._calls.find_run(run)
        self._path = run_path(self.run)

    def close(self) -> None:
        """Disconnect."""
        self._calls.close()
        self._client.close()

    def add(self, prompts: Sequence[Prompt], first: int) -> None:
        """Add prompts to the run. The same ones under the same numbers change nothing."""
        self._calls.add_prompts(self.run, prompts, first=first)

    def next_task(self, wait_s: float) -> TakenTask:
        """Take a task; NotReadyError with the reasons if there is none within `wait_s`."""
        body, limit_s = {"wait_s": wait_s}, wait_s + SOCKET_TIMEOUT_S
        path = f"{self._path}/tasks"
        found = self._client.call("POST", path, content=body, limit_s=limit_s)
        group = found["group_id"]
        return TakenTask(
            group_id=group,
            prompt_uid=found["prompt_uid"],
            num_samples=found["num_samples"],
            payload=base64.b64decode(found["payload"]),
            trajectories=[
                TrajectoryKey(group, each["sample"], each["attempt"])
                for each in found["trajectories"]
            ],
        )

    def end_task(self, body: Mapping[str, Any]) -> None:
        """Abandon what is open of a task."""
        self._client.post(f"{self._path}/tasks/end", body)

    def new_session(
        self, task: TakenTask, key: TrajectoryKey, *, expires_in_s: int, **fields: Any
    ) -> dict[str, Any]:
        """Make a session key of a trajectory; return the answer."""
        content = {
            **key._asdict(),
            "num_samples": task.num_samples,
            "prompt_uid": task.prompt_uid,
            "expires_in_s": expires_in_s,
            **fields,
        }
        return new_session(self._url, self.run, content)

    def facts(self, session: str) -> Facts:
        """Return the facts of a session, whose lease is kept from then on."""
        with contextlib.closing(GatewayClient(self._session_url(session), prefix=AGENTS)) as client:
            found = client.get("/session")
        return Facts(found["num_turns"], found["last_incomplete"])

    def seal(self, session: str, content: Mapping[str, Any]) -> None:
        """Seal the trajectory of a session."""
        end_session(self._session_url(session), content)

    def prompts(self) -> dict[str, int] | None:
        """Return the numbers of the prompts by state; None if the key may not read them."""
        try:
            return self._client.get(f"{self._path}/ledger", state="open")["prompts"]
        except AccessDeniedError:
            return None

    def _session_url(self, session: str) -> str:
        return with_key(without_key(self._url), session)


class Caller:
    """Makes blocking calls in threads, and repeats them while the gateway or its store is away.

    Attributes:
        trouble: why the last call waits; "" if it does not.
    """

    def __init__(self) -> None:
        self.trouble = ""
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="rollout")

    def close(self) -> None:
        """End the threads, once their calls have ended."""
        self._threads.shutdown()

    async def once(self, call: Callable[..., _Result], *arguments: Any, **named: Any) -> _Result:
        """Make a call."""
        bound = functools.partial(call, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._threads, bound)

    async def __call__(self, call: Callable[..., _Result], *args: Any, **named: Any) -> _Result:
        """Make a call until it has an answer; NotReadyError is one."""
        num_failed = 0
        while True:
            try:
                result = await self.once(call, *args, **named)
            except NotReadyError:
                raise
            except (UnavailableError, RejectedError) as error:
                if isinstance(error, RejectedError) and error.retry_after_s is None:
                    raise
                num_failed += 1
                self.trouble = str(error)
                await asyncio.sleep(error.retry_after_s or pause_after(num_failed))
            else:
                self.trouble = ""
                return result
