"""The rule of turns: equal shares at each step, and a start for each sequence."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from turnstream_server.models.fair_turns import BatchLimits, Share, next_turn

SHARES = [Share(owner, session) for owner in "abc" for session in "12"]


class Job(NamedTuple):
    """A sequence: its number, the step of its arrival, its share, and its tokens."""

    number: int
    arrival: int
    share: Share
    length: int


JOBS = st.lists(
    st.tuples(st.integers(0, 10), st.sampled_from(SHARES), st.integers(1, 25)),
    min_size=12,
    max_size=40,
).map(lambda rows: [Job(number, *row) for number, row in enumerate(sorted(rows))])


class Batch:
    """Runs jobs by the rule; every running one gets a token in each step."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.waiting: dict[Share, list[Job]] = {}
        self.running: list[Job] = []
        self.tokens: Counter[int] = Counter()

    def step(self, arrived: list[Job]) -> None:
        """Add jobs, start all that have a turn, and add a token to each running one."""
        for job in arrived:
            self.waiting.setdefault(job.share, []).append(job)
        while self._start():
            assert self.limits.allow([each.length for each in self.running])
        self.tokens.update(each.number for each in self.running)
        self.running = [each for each in self.running if self.tokens[each.number] < each.length]

    def _start(self) -> bool:
        first = {share: own[0].length for share, own in self.waiting.items()}
        running = [(each.share, each.length) for each in self.running]
        turn = next_turn(first, running, limits=self.limits)
        if turn is None:
            return False
        paused = [self.running[place] for place in turn.paused]
        self.running = [each for each in self.running if each not in paused]
        own = self.waiting.pop(turn.share)
        self.running.append(own.pop(0))
        if own:
            self.waiting[turn.share] = own
        for job in paused:
            self.waiting.setdefault(job.share, []).insert(0, job)
        return True


@given(JOBS, st.integers(1, 8), st.integers(25, 200))
def test_every_sequence_ends_within_the_limits(
    jobs: list[Job], max_sequences: int, max_cached_tokens: int
) -> None:
    limits = BatchLimits(max_sequences=max_sequences, max_cached_tokens=max_cached_tokens)
    batch = Batch(limits)
    # As many steps as with one sequence at a time.
    for step in range(11 + sum(job.length for job in jobs)):
        batch.step([job for job in jobs if job.arrival == step])

    assert not batch.waiting
    assert all(batch.tokens[job.number] == job.length for job in jobs)


def test_share_that_does_not_fit_is_overtaken_only_by_a_pause() -> None:
    long, short, other = SHARES[0], SHARES[2], SHARES[4]
    limits = BatchLimits(max_cached_tokens=60)

    assert next_turn({long: 40, short: 10}, [(other, 20)], limits=limits) is None
    assert next_turn({short: 10}, [(other, 20)], limits=limits) == (short, ())
    paused = next_turn({long: 40, short: 20}, [(other, 20)] * 3, limits=limits)
    assert paused == (short, (2,))


@given(JOBS, st.integers(1, 8))
def test_waiting_share_has_at_most_one_running_sequence_less(
    jobs: list[Job], max_sequences: int
) -> None:
    batch = Batch(BatchLimits(max_sequences=max_sequences))
    for step in range(11):
        batch.step([job for job in jobs if job.arrival == step])
        while batch._start():
            pass
        of_owner = Counter(job.share.owner for job in batch.running)
        of_share = Counter(job.share for job in batch.running)
        for share in batch.waiting:
            assert max(of_owner.values()) <= of_owner[share.owner] + 1
            own = [of_share[each] for each in SHARES if each.owner == share.owner]
            assert max(own) <= of_share[share] + 1
