"""The end of groups that were opened to evaluate, told to the ledger."""

from __future__ import annotations

from typing import Final

from turnstream.batching.fold.decisions import GroupEvaluated
from turnstream.records.evals import encode_eval_group, encode_eval_result
from turnstream.store.client import keys
from turnstream.store.client.scripts import Command
from turnstream.store.run.evals import version_field
from turnstream_server.bus.leadership.leadership import LeaderScript, Term

COUNTED: Final = "part of an evaluation"
NOT_COUNTED: Final = "its evaluation ended without it"

_SETTLE: Final = LeaderScript(
    "settle_eval",
    "planning",
    "groups ledger counts members deadlines leases evals evalgroups held budget wake",
)


def settle_eval_command(term: Term, ended: GroupEvaluated) -> Command:
    """The call that ends such a group and keeps what it gave, once; nothing is sent."""
    result, total = ended.result, ended.total
    return _SETTLE(
        term,
        keys.encode_name(ended.group_id),
        COUNTED,
        NOT_COUNTED,
        b"" if result is None else encode_eval_group(result),
        "" if result is None else version_field(result.version),
        b"" if total is None else encode_eval_result(total),
        *map(keys.trajectory_id, ended.keys),
    )
