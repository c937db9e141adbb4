"""Statistics of a job: the history of its run, read in increments, and pure functions of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import redis
from rich.table import Table

from turnstream.errors import RecordError
from turnstream.records.events import decode_event
from turnstream.records.manifests import decode_manifest
from turnstream.store.client import keys
from turnstream.types import GroupOpened, SealedTrajectory, TrajectoryKey
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.ledger.core.scan import entry_ms, server_ms, stream_entries
from turnstream_server.ledger.queries.ledger import read_ledger
from turnstream_server.ledger.queries.run_facts import BatchNumbers, mean, numbers_of, ratio

_LAST_OF_STEP = (1 << 64) - 1
"""Above every revision in the id of a plan, which is <step>-<revision>."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The statistics of a job.

    Attributes:
        trajectories: accepted; equals the sum of `ledger`.
        turns: turns of the sealed trajectories.
        sequences: trained rows.
        batches, steps: planned batches, and those that the trainer acknowledged.
        merge_ratio: tokens of the trained turns sent one by one / tokens of the trained rows.
        padding_share: padding positions of the trained mini-batches, left-padded, 0 to 1.
        wire_bytes: stored turn records of the sealed trajectories.
        resend_bytes: the same records, if every turn had its whole context.
        tokens_per_s: tokens of the trained rows / seconds.
        reward_first_tenth, reward_last_tenth: mean over the sealed trajectories, in the order of
            their seals; None before the first.
        ledger: number of trajectories by state, only states that occur.
    """

    groups: int
    trajectories: int
    turns: int
    sequences: int
    batches: int
    steps: int
    merge_ratio: float
    padding_share: float
    wire_bytes: int
    resend_bytes: int
    tokens_per_s: float
    reward_first_tenth: float | None
    reward_last_tenth: float | None
    ledger: Mapping[str, int]

    def to_json(self) -> str:
        """Return one JSON object, a key per attribute."""
        return json.dumps(asdict(self), indent=2) + "\n"


def summarise(
    *,
    num_groups: int,
    sealed: Sequence[SealedTrajectory],
    batches: Sequence[BatchNumbers],
    planned: int,
    stepped: int,
    ledger: Mapping[str, int],
    elapsed_s: float,
) -> Summary:
    """Return the statistics of a job; `batches` are the trained ones."""
    num_tokens = sum(batch.num_tokens for batch in batches)
    num_positions = sum(batch.num_positions for batch in batches)
    wire_bytes = sum(each.num_payload_bytes for each in sealed)
    shared_tokens = sum(turn.shared_tokens for each in sealed for turn in each.turns)
    first, last = reward_tenths([each.reward or 0.0 for each in sealed])
    return Summary(
        groups=num_groups,
        trajectories=sum(ledger.values()),
        turns=sum(len(each.turns) for each in sealed),
        sequences=sum(batch.num_rows for batch in batches),
        batches=planned,
        steps=stepped,
        merge_ratio=ratio(sum(batch.num_turn_tokens for batch in batches), num_tokens),
        padding_share=ratio(num_positions - num_tokens, num_positions),
        wire_bytes=wire_bytes,
        resend_bytes=wire_bytes + 4 * shared_tokens,  # token ids are int32
        tokens_per_s=ratio(num_tokens, elapsed_s),
        reward_first_tenth=first,
        reward_last_tenth=last,
        ledger={state: count for state, count in ledger.items() if count},
    )


def reward_tenths(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean of the first and of the last tenth, rounded up to at least one reward each.

    >>> reward_tenths([0.0, 1.0] + [0.5] * 17 + [1.0])
    (0.5, 0.75)
    """
    size = -(-len(rewards) // 10)
    return mean(rewards[:size]), mean(rewards[-size:])


class RunHistory:
    """The statistics of one run since its beginning.

    An event may be in the stream twice; it counts once.
    """

    def __init__(self, client: redis.Redis, run: str) -> None:
        self._client = client
        self._run = run
        self._names = keys.run_keys(run)
        self._groups: set[str] = set()
        self._sealed: dict[TrajectoryKey, SealedTrajectory] = {}
        self._batches: dict[int, BatchNumbers] = {}
        self._stepped = 0
        self._last_event = ""
        self._first_event_ms = 0
        self._last_step_ms = 0

    def summary(self) -> Summary:
        """Return the statistics, with everything that was added since the last call."""
        for entry_id, record in stream_entries(
            self._client, self._names.events, after=self._last_event
        ):
            self._first_event_ms = self._first_event_ms or entry_ms(entry_id)
            self._last_event = entry_id
            self._add_event(record)
        # A step is planned again after damage, unless it is stepped.
        after = f"{self._stepped}-{_LAST_OF_STEP}"
        for _, record in stream_entries(self._client, self._names.plan, after=after, page=1):
            manifest = decode_manifest(record)
            self._batches[manifest.step] = numbers_of(manifest)
        frontier = read_frontier(self._client, self._run)
        if frontier.stepped != self._stepped:
            self._stepped, self._last_step_ms = frontier.stepped, server_ms(self._client)
        ledger = read_ledger(self._client, self._run)
        ledger.check()
        return summarise(
            num_groups=len(self._groups),
            sealed=[*self._sealed.values()],
            batches=[batch for step, batch in self._batches.items() if step <= frontier.stepped],
            planned=frontier.planned,
            stepped=frontier.stepped,
            ledger={str(state): count for state, count in ledger.by_state.items()},
            elapsed_s=max(0, self._last_step_ms - self._first_event_ms) / 1_000,
        )

    def _add_event(self, record: bytes) -> None:
        try:
            event = decode_event(record)
        except RecordError:
            return  # the planner sets it aside
        if isinstance(event, GroupOpened):
            self._groups.add(event.group_id)
        elif isinstance(event, SealedTrajectory):
            self._sealed.setdefault(event.key, event)


def summary_table(summary: Summary, *, title: str) -> Table:
    """Return the summary as a table."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    saved = ratio(summary.resend_bytes, summary.wire_bytes)
    counts = ("groups", "trajectories", "turns", "sequences", "batches", "steps")
    for rows in (
        [(name, f"{getattr(summary, name):,}") for name in counts],
        [
            ("merge ratio", f"{summary.merge_ratio:.2f}"),
            ("padding share", f"{summary.padding_share:.1%}"),
            ("bytes sent", f"{summary.wire_bytes:,}"),
            ("bytes if re-sent", f"{summary.resend_bytes:,} ({saved:.2f} x)"),
            ("tokens/s", f"{summary.tokens_per_s:,.0f}"),
        ],
        [
            ("reward, first tenth", _shown(summary.reward_first_tenth)),
            ("reward, last tenth", _shown(summary.reward_last_tenth)),
        ],
        [(f"ledger: {state}", f"{count:,}") for state, count in summary.ledger.items()],
    ):
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def _shown(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"
