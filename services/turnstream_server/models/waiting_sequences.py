"""The sequences that wait for the running batch, in one queue for each share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from turnstream_server.models.fair_turns import Share
from turnstream_server.models.sampling_requests import SampleRequest, SampleSequence


class WaitingSequences:
    """New requests, and sequences that have run before and come first.

    Sequences of a request are made when they start: a request may have thousands of them.
    """

    def __init__(self) -> None:
        self._queues: dict[Share, deque[SampleRequest | SampleSequence]] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, request: SampleRequest) -> None:
        """Add the sequences of a request after all of its share."""
        self._queues.setdefault(request.share, deque()).append(request)

    def add_first(self, sequences: Iterable[SampleSequence]) -> None:
        """Add sequences that have run, before all of their shares, in this order."""
        for each in reversed([*sequences]):
            self._queues.setdefault(each.request.share, deque()).appendleft(each)

    def first(self) -> dict[Share, SampleRequest | SampleSequence]:
        """Return the first of each share that is not over, the longest waiting share first."""
        for share, queue in [*self._queues.items()]:
            while queue and _request(queue[0]).is_over():
                queue.popleft()
            if not queue:
                del self._queues[share]
        return {share: queue[0] for share, queue in self._queues.items()}

    def take(self, share: Share) -> SampleSequence | None:
        """Remove and return the first sequence of a share, which is the last in turn then.

        Returns None if it cannot be made; its request has failed.
        """
        queue = self._queues.pop(share)
        first = queue.popleft()
        sequence = first if isinstance(first, SampleSequence) else _made(first)
        if isinstance(first, SampleRequest) and first.num_waiting and not first.is_over():
            queue.appendleft(first)
        if queue:
            self._queues[share] = queue
        return sequence

    def requests(self) -> Iterator[SampleRequest]:
        """Yield the request of each entry; one may come several times."""
        return (_request(each) for queue in self._queues.values() for each in queue)

    def paused(self) -> Iterator[SampleSequence]:
        """Yield the sequences that have run."""
        entries = (each for queue in self._queues.values() for each in queue)
        return (each for each in entries if isinstance(each, SampleSequence))

    def clear(self) -> None:
        """Remove all entries."""
        self._queues.clear()


def _made(request: SampleRequest) -> SampleSequence | None:
    try:
        return request.next_sequence()
    except Exception as error:  # noqa: BLE001 - the tokenizer reads the prompt here
        request.fail(error)
        return None


def _request(entry: SampleRequest | SampleSequence) -> SampleRequest:
    return entry if isinstance(entry, SampleRequest) else entry.request
