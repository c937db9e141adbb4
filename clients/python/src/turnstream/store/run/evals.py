"""Results of a run's evaluations by policy version."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import redis

from turnstream.records.evals import decode_evaluation
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import find_run, no_such_run
from turnstream.types import EvalGroup, EvalResult

_UNKNOWN: Final = "unknown"
_PAGE: Final = 1_000


def eval_results(client: redis.Redis, run: str) -> list[EvalResult]:
    """Return the result of each version, the oldest first, an unknown version before all.

    The newest 1,000 versions and at least the newest 10,000 groups are kept. A version under
    evaluation has the results of its ended groups.
    """
    run = find_run(client, run)
    names = keys.run_keys(run)
    with translating():
        stepped: Any = client.hget(names.frontier, "stepped")
        records: Any = client.hvals(names.evals)
    if stepped is None:
        raise no_such_run(run)
    groups: dict[int | None, list[EvalGroup]] = defaultdict(list)
    for group in _read_groups(client, names.evalgroups):
        groups[group.version].append(group)
    results = [decode_evaluation(EvalResult, record) for record in records]
    results.sort(key=lambda each: -1 if each.version is None else each.version)
    return [replace(each, groups=tuple(groups[each.version])) for each in results]


def version_field(version: int | None) -> str:
    """Return the name of a version among the results.

    >>> version_field(7), version_field(None)
    ('7', 'unknown')
    """
    return _UNKNOWN if version is None else str(version)


def _read_groups(client: redis.Redis, stream: str) -> Iterator[EvalGroup]:
    page: Any = [(b"", {})]
    while page:
        start = f"({page[-1][0].decode()}" if page[-1][0] else "-"
        with translating():
            page = client.xrange(stream, start, "+", count=_PAGE)
        yield from (decode_evaluation(EvalGroup, fields[b"r"]) for _, fields in page)
