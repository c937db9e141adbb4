"""The wait for newer weights, over the routes of a gateway."""

from __future__ import annotations

from typing import Any

from turnstream.errors import NotReadyError, WaitReason
from turnstream.http.client import GatewayClient
from turnstream.http.problems import reasons_of
from turnstream.store.client.addresses import address_of
from turnstream.store.client.deadlines import SOCKET_TIMEOUT_S
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.types import VersionAnnounced


def wait_for_version(
    client: GatewayClient, path: str, *, run: str, above: int, timeout_s: float
) -> VersionAnnounced:
    """Return the newest version, once it is higher than `above`.

    The gateway holds each request until there is one, or for some seconds.

    Args:
        client: client of the gateway.
        path: path of the run.
        run: id of the run, for people.
        above: the highest known version.
        timeout_s: length of the wait.

    Raises:
        NotReadyError: no such version was announced within `timeout_s`, and why.
        StoreUnavailableError: the gateway or its store is away, or did not answer by then.
    """
    what = f"run {run!r}: no version above {above}"
    wait = StoreWait(address_of(client.gateway.base_url), "version", what, wait_s=timeout_s)
    while True:
        with wait.answering() as left_s:
            held_s = wait.block_ms / 1000
            limit_s = min(left_s, held_s + SOCKET_TIMEOUT_S)
            query = {"above": above, "limit": 1, "wait_s": held_s}
            found = client.call("GET", f"{path}/versions", query=query, limit_s=limit_s)
        if found["versions"]:
            return announced(found["newest"])
        wait.note_answer(f"no version above {above} was announced")
        if wait.has_timed_out:
            reasons = reasons_of(found.get("reasons"))
            raise NotReadyError(wait.message, [_waited(each, timeout_s) for each in reasons])


def announced(version: dict[str, Any]) -> VersionAnnounced:
    """Return a version from the JSON of a gateway."""
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
