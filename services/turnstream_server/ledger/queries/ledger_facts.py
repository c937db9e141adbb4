"""The ledger of a run in plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import redis

from turnstream_server.ledger.queries.ledger import read_states


def ledger_facts(client: redis.Redis, run: str) -> dict[str, Any]:
    """Return the states of a run's trajectories, with counts, reasons and bytes.

    Raises:
        LedgerMismatchError: the states do not add up.
        CorruptRecordError: a field is damaged; names its key.
    """
    seen = read_states(client, run)
    seen.counts.check()
    counts, frontier, prompts = seen.counts, seen.frontier, seen.prompts
    return {
        "run": run,
        "accepted": counts.accepted,
        "conflicts": counts.num_conflicts,
        "last_conflict": counts.last_conflict,
        "late_rewards": counts.num_late_rewards,
        **{name: getattr(frontier, name) for name in ("planned", "stepped", "committed")},
        "lineage": frontier.lineage,
        "rollbacks": [each._asdict() for each in frontier.rollbacks],
        "origin": None if frontier.origin is None else asdict(frontier.origin),
        "states": {
            facts.state.value: {
                "count": facts.count,
                "reasons": dict(facts.reasons),
                "held_bytes": facts.held_bytes,
            }
            for facts in seen.states
        },
        "prompts": {
            name: getattr(prompts, f"num_{name}")
            for name in ("added", "left", "given", "trained", "filtered")
        },
        "budget": seen.budget._asdict(),
        "full": seen.budget.why_full,
    }
