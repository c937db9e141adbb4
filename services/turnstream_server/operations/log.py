"""The operation log of a model: submitted in any order, run strictly by number, finished once.

The gateway submits with `submit`. One worker at a time owns the log of a model::

    log = ModelLog.acquire(client, model_id, worker="w0", lease_s=15)
    for entry in log.history():        # after the newest durable checkpoint
        ...                            # run it again; its result stays
    work = log.take()
    if isinstance(work, Run):
        ...                            # run the operations work.first to work.last
        log.finish({number: result})
    log.cover(number, checkpoint="...")

All calls are safe to repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self, cast

import redis
import redis.asyncio

from turnstream.errors import (
    BatchingError,
    ConflictError,
    EndOfRunError,
    FencedError,
    RejectedError,
    RunNotFoundError,
)
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Argument, Script, run_command, run_command_async
from turnstream_server.operations.announcing import announce, announce_finished
from turnstream_server.operations.contents import OperationKind, fingerprint_async
from turnstream_server.operations.keys import RequestId, model_keys
from turnstream_server.operations.results import (
    Failure,
    Result,
    encode_result,
    failure_around,
    keep_unfetched,
)

DEFAULT_GAP_S: Final = 120.0
"""Seconds for which a missing number is awaited while later ones wait."""

MAX_SHARED: Final = 64
"""Most training calls that share device passes."""

MAX_SHARED_BYTES: Final = 64 << 20

MAX_AHEAD: Final = 10_000
"""Most numbers between a new operation and the one that runs next: a missing number fails them
all in one script."""

_SLICE: Final = 1_000
"""Operations of one read of the history."""

_SCRIPTS: Final = "turnstream_server.operations"
_SUBMIT: Final = Script("submit", _SCRIPTS)
_ACQUIRE: Final = Script("acquire", _SCRIPTS)
_RENEW: Final = Script("renew", _SCRIPTS)
_TAKE: Final = Script("take", _SCRIPTS)
_FINISH: Final = Script("finish", _SCRIPTS)
_COVER: Final = Script("cover", _SCRIPTS)
_MARK: Final = "NUMBER"
_LOST: Final = (
    f"operation {_MARK} of the model has never arrived, and this one waited for it: it was not "
    "run. The gradient lacks the missing one"
)


class Run(NamedTuple):
    """Operations that run next: one, or training calls that share passes.

    Attributes:
        first, last: their numbers; all numbers between them belong to it.
    """

    first: int
    last: int
    kind: OperationKind

    @property
    def numbers(self) -> range:
        """The numbers of the operations."""
        return range(self.first, self.last + 1)


class Idle(NamedTuple):
    """No operation is waiting."""


class Gap(NamedTuple):
    """Later operations wait for a missing number, for `left_s` more seconds at most."""

    missing: int
    left_s: float


class Lost(NamedTuple):
    """A missing number has failed the operations after it; they are finished.

    Attributes:
        failed: their numbers, with the missing ones.
    """

    missing: int
    failed: tuple[int, ...]


Work = Run | Idle | Gap | Lost


async def submit(
    client: redis.asyncio.Redis,
    model_id: str,
    number: int,
    kind: OperationKind,
    content: bytes,
    *,
    identity: bytes | None = None,
    refusal: Failure | None = None,
) -> RequestId:
    """Append an operation, once, and return its request id.

    Args:
        client: the store.
        model_id: the model, which must exist.
        number: place in the log; numbers may arrive in any order.
        kind: kind of the operation.
        content: `encode_content` or `encode_operation`.
        identity: `identity_of` the content; None takes the content. The same number with the same
            identity has the same request id, and the first content runs once.
        refusal: result of an operation that must not run. It uses up its number.

    Raises:
        RunNotFoundError: there is no such model.
        ConflictError: the number was submitted with another content; nothing has changed.
        EndOfRunError: the session of the model has ended.
        BatchingError: the number is more than MAX_AHEAD after the one that runs next.
    """
    keys = model_keys(model_id)
    refused = encode_result(refusal) if refusal else b""
    entry = f"{kind} {await fingerprint_async(content if identity is None else identity)}"
    command = _SUBMIT(
        [keys.model, keys.commands, keys.bodies, keys.results],
        *(number, entry, b"" if refused else content, refused, MAX_AHEAD),
    )
    reply = await run_command_async(client, command)
    code, request_id = reply[0], RequestId(model_id, number)
    if code == b"unknown":
        raise RunNotFoundError(f"there is no model {model_id!r}")
    if code == b"conflict":
        raise ConflictError(f"seq_id {number} of model {model_id!r} has come with other content")
    if code == b"ended":
        raise EndOfRunError(f"the session of model {model_id!r} has ended: {reply[1].decode()}")
    if code == b"ahead":
        message = f"expected {reply[1] + MAX_AHEAD} at most: {reply[1]} runs next"
        raise BatchingError(f"seq_id {number} of model {model_id!r}: {message}")
    with translating():
        if refusal:
            await announce(client, request_id)
        # Also after a refusal: it may be the number for which the worker waits.
        await announce(client, model_id)
    return request_id


async def read_bodies(
    client: redis.asyncio.Redis, model_id: str, numbers: Sequence[int]
) -> dict[int, bytes]:
    """Return the contents of operations; refused and covered ones have none."""
    with translating():
        bodies = await cast(Any, client.hmget(model_keys(model_id).bodies, [*map(str, numbers)]))
    return _found(numbers, bodies)


def num_waiting(client: redis.Redis, models: Sequence[str]) -> int:
    """Return the number of operations of some models that were submitted and have not run."""
    with translating():
        pipeline = client.pipeline(transaction=False)
        for model_id in models:
            pipeline.hmget(model_keys(model_id).model, "next", "submitted")
        positions: list[Any] = pipeline.execute() if models else []
    return sum(
        max(0, int(submitted) + 1 - int(next_number))
        for next_number, submitted in positions
        if next_number is not None and submitted is not None
    )


class HistoryEntry(NamedTuple):
    """Operations that were run after the newest durable checkpoint, and changed the model."""

    run: Run
    skipped: frozenset[int]
    """Numbers of the run that failed, and had no effect."""


class ModelLog:
    """The log of one model, as its only worker.

    Every call but `read` raises EndOfRunError once the session of the model has ended, and
    FencedError once another worker has taken over. FencedError is also raised after the store has
    lost writes of this worker, for example by a power cut: the log must be acquired again.

    Attributes:
        model_id: the model.
        next_number: number that runs next, when the log was acquired.
        covered: newest number that a durable checkpoint covered then; -1 for none.
        checkpoint: name of that checkpoint; "" for none.
    """

    def __init__(
        self,
        client: redis.Redis,
        model_id: str,
        *,
        epoch: int,
        next_number: int,
        covered: int,
        checkpoint: str,
    ) -> None:
        self.model_id = model_id
        self.next_number = next_number
        self.covered = covered
        self.checkpoint = checkpoint
        self._client = client
        self._keys = model_keys(model_id)
        self._epoch = epoch
        self._reached = next_number

    @classmethod
    def acquire(cls, client: redis.Redis, model_id: str, *, worker: str, lease_s: float) -> Self:
        """Return the log, which no other worker can write to until the lease has ended.

        A worker of the same name is replaced at once.

        Raises:
            RunNotFoundError: there is no such model.
            EndOfRunError: the session of the model has ended.
            RejectedError: another worker has the log; `retry_after_s` says for how long.
        """
        keys = [model_keys(model_id).model]
        code, *values = run_command(client, _ACQUIRE(keys, worker, round(lease_s * 1000)))
        if code == b"acquired":
            epoch, next_number, covered, checkpoint = values
            return cls(
                client,
                model_id,
                epoch=epoch,
                next_number=next_number,
                covered=covered,
                checkpoint=checkpoint.decode(),
            )
        if code == b"held":
            message = f"model {model_id!r} is run by worker {values[0].decode()!r}"
            raise RejectedError(message, values[1] / 1000)
        raise _refusal(code, model_id)

    def renew(self, *, lease_s: float) -> None:
        """Renew the lease from now on; 0 ends it."""
        command = _RENEW([self._keys.model], self._epoch, round(lease_s * 1000))
        _raise_refusal(run_command(self._client, command), self.model_id)

    def take(self, *, gap_s: float = DEFAULT_GAP_S) -> Work:
        """Return the operations that run next, strictly by number.

        Adjacent training calls of one kind are returned together. The cut is recorded, so that it
        is the same after a crash. Lost operations have their results; their waiters are notified.
        """
        before, after = failure_around(_LOST, "server", mark=_MARK)
        keys = self._keys
        code, *values = self._call(
            _TAKE,
            [keys.model, keys.commands, keys.bodies, keys.results, keys.passes],
            *(round(gap_s * 1000), MAX_SHARED, MAX_SHARED_BYTES, before, after),
        )
        if code == b"idle":
            return Idle()
        if code == b"gap":
            return Gap(values[0], values[1] / 1000)
        if code == b"lost":
            missing, *failed = values
            self._reached = failed[-1] + 1
            self._announce(failed)
            return Lost(missing, tuple(failed))
        first, last, kind = values
        self._reached = first
        return Run(first, last, kind.decode())

    def read(self, numbers: range) -> dict[int, bytes]:
        """Return the contents of operations; refused and covered ones have none."""
        with translating():
            bodies = cast(
                "list[bytes | None]", self._client.hmget(self._keys.bodies, [*map(str, numbers)])
            )
        return _found(numbers, bodies)

    def history(self) -> Iterator[HistoryEntry]:
        """Yield what was run after the newest durable checkpoint, in order, with its passes.

        Without those that were refused or failed: they had no effect.
        """
        with translating():
            passes = cast("dict[bytes, bytes]", self._client.hgetall(self._keys.passes))
        ends = {int(first): int(last) for first, last in passes.items()}
        number = self.covered + 1
        while number < self.next_number:
            end = min(number + _SLICE, self.next_number)
            # The last pass of a slice may reach beyond it.
            kinds = self._changing(range(number, min(end + MAX_SHARED, self.next_number)))
            while number < end:
                last = min(ends.get(number, number), self.next_number - 1)
                run = range(number, last + 1)
                if kept := [each for each in run if each in kinds]:
                    skipped = frozenset(run).difference(kept)
                    yield HistoryEntry(Run(number, last, kinds[kept[0]]), skipped)
                number = last + 1

    def finish(self, results: Mapping[int, Result]) -> None:
        """Write the results of operations, all or none, and notify their waiters.

        A result that exists stays: nothing that was answered changes.
        """
        if not results:
            return
        keys = self._keys
        pairs = [(number, encode_result(results[number])) for number in sorted(results)]
        # First: a result without an entry would stay after a crash.
        names = [(RequestId(self.model_id, number), data) for number, data in pairs]
        keep_unfetched(self._client, names)
        words = [word for pair in pairs for word in pair]
        all_keys = [keys.model, keys.commands, keys.bodies, keys.results]
        _, self._reached = self._call(_FINISH, all_keys, *words)
        self._announce(results)

    def cover(self, number: int, *, checkpoint: str) -> None:
        """Record that a durable checkpoint holds the effect of all operations up to a number.

        Their contents are deleted. A worker that acquires the log begins with this checkpoint.
        """
        keys, left = self._keys, 1
        while left:
            found = self._call(_COVER, [keys.model, keys.bodies, keys.passes], number, checkpoint)
            _, left = found

    def _changing(self, numbers: range) -> dict[int, OperationKind]:
        """Return the kinds of the operations among these numbers that were run, and not in vain."""
        names = [*map(str, numbers)]
        keys = self._keys
        with translating():
            pipeline = self._client.pipeline(transaction=False)
            pipeline.hmget(keys.commands, names)
            for name in names:
                pipeline.hexists(keys.bodies, name)
            pipeline.hmget(keys.model, "epoch", "ended")  # after what it vouches for
            entries, *has_body, (epoch, ended) = pipeline.execute()
        if epoch != b"%d" % self._epoch or ended is not None:
            raise _refusal(b"ended" if ended else b"fenced", self.model_id)
        return {
            number: cast(OperationKind, entry.decode().partition(" ")[0])
            for number, entry, found in zip(numbers, entries, has_body, strict=True)
            if found
        }

    def _announce(self, numbers: Iterable[int]) -> None:
        announce_finished(self._client, (RequestId(self.model_id, each) for each in numbers))

    def _call(self, script: Script, keys: Sequence[str], *args: Argument) -> Any:
        command = script(keys, self._epoch, self._reached, *args)
        return _raise_refusal(run_command(self._client, command), self.model_id)


def _raise_refusal(reply: list[Any], model_id: str) -> list[Any]:
    """Return the reply to a worker; raise if the worker must stop."""
    if reply[0] in (b"fenced", b"ended", b"behind"):
        raise _refusal(reply[0], model_id)
    return reply


def _refusal(code: bytes, model_id: str) -> RejectedError:
    if code == b"fenced":
        return FencedError(f"another worker runs model {model_id!r}")
    if code == b"behind":
        return FencedError(f"the store has lost results of model {model_id!r}: acquire it again")
    if code == b"ended":
        return EndOfRunError(f"the session of model {model_id!r} has ended")
    return RunNotFoundError(f"there is no model {model_id!r}")


def _found(numbers: Iterable[int], bodies: Iterable[bytes | None]) -> dict[int, bytes]:
    found = zip(numbers, bodies, strict=True)
    return {number: body for number, body in found if body is not None}
