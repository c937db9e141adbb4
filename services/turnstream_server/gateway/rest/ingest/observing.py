"""Metrics and log of the writes of a request."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from turnstream_server.gateway.rest.ingest.delivery import Outcome
from turnstream_server.gateway.rest.ingest.writes import Write
from turnstream_server.telemetry.instruments import counter

logger = logging.getLogger(__name__)

_TRAJECTORIES = counter(
    "turnstream_gateway_ingested_trajectories",
    "Trajectories of requests that were sealed, abandoned, or refused.",
    ["outcome"],
)
_TURNS = counter(
    "turnstream_gateway_ingested_turns",
    "Turns of requests that were stored, or refused.",
    ["outcome"],
)
_TOKENS = counter(
    "turnstream_gateway_ingested_tokens",
    "Prompt and response tokens of the stored turns of requests.",
)


def observe_writes(run: str, writes: Sequence[Write], outcomes: Sequence[Outcome]) -> None:
    """Count the writes of a request, and log each at level DEBUG."""
    is_logged = logger.isEnabledFor(logging.DEBUG)
    for write, outcome in zip(writes, outcomes, strict=True):
        is_stored = outcome.error is None
        if not is_stored:
            _TRAJECTORIES.labels("refused").inc()
        elif write.state != "open":
            _TRAJECTORIES.labels("abandoned" if write.state == "abandoned" else "sealed").inc()
        _TURNS.labels("stored" if is_stored else "refused").inc(len(write.turns))
        if is_stored:
            turns = (each.turn for each in write.turns)
            _TOKENS.inc(sum(len(turn.prompt_ids) + len(turn.response_ids) for turn in turns))
        if is_logged:
            facts = {"run": run, "trajectory": write.key.trajectory_id}
            facts |= {"state": write.state, "turns": len(write.turns)}
            logger.debug("stored" if is_stored else "refused: %s", *_reason(outcome), extra=facts)


def _reason(outcome: Outcome) -> tuple[object, ...]:
    return () if outcome.error is None else (outcome.error,)
