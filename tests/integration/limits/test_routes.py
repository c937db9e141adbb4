"""The cost of the largest accepted request of every route of the gateway.

The routes are those of the application: a new one needs an entry in `LARGEST`.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, Final

import httpx2
import pytest
import redis

from testkit.requests.ingest import ARROW
from testkit.requests.largest_requests import (
    ANY,
    BASE,
    LONG_EVENTS,
    Entry,
    Sent,
    World,
    calls,
    deletion,
    events,
    groups,
    message_call,
    model_call,
    of_session,
    plain,
    prompts,
    reads,
    response_call,
    rewards,
    sample,
    session_end,
    sessions,
    small,
    tasks_end,
    training,
    trajectories,
    turns,
)
from testkit.runs.large_runs import MAX_RUNS, PLANNED, LargeRun, add_runs, longest_seal
from testkit.services.engine_doubles import large_engine
from testkit.services.gateway_process import Cost, GatewayProcess, measured
from testkit.services.gateways import routes_of, unused_gateway
from testkit.worst_calls.store import cpu_ms
from turnstream.store.client.connection import connect
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.app import make_app
from turnstream_server.gateway.rest.bodies import MAX_SMALL_BYTES as MAX_REST_BYTES
from turnstream_server.operations.models import register_base

MOST: Final = Cost(cpu_s=2.0, memory_mb=256.0)
MOST_OF_SLICE_S: Final = 0.25
"""CPU time of one slice of a response without end."""

MOST_OF_STORE_MS: Final = 50.0
TRIES: Final = 3
"""Requests, of which the best counts for the store: others use the caches of a busy machine."""

_KEY: Final = {"X-API-Key": "tml-limits"}  # the Tinker API needs one, also on the loopback

_CHECKPOINTS: Final = "/api/v1/training_runs/{model_id}/checkpoints"
_RUN: Final = "/v1/runs/{run}"
_SMALL: Final = (
    *("retrieve_future", "cancel_future", "create_sampling_session", "optim_step"),
    *("forward_backward_run", "save_weights", "save_weights_for_sampler", "save_weights_external"),
    *("load_weights", "get_info", "weights_info", "create_session", "session_heartbeat"),
    *("sessions/{session_id}/finish", "create_model", "client/config", "client/dynamic_config"),
    "telemetry",
)
_PLAIN: Final = (
    *("/healthz", "/readyz", "/metrics", "/v1/openapi.json", "/v1/ping", "/v1/batchers"),
    f"{_RUN}/batches/{{step}}/{{index}}",
    *(f"/api/v1/{name}" for name in ("samplers/{sampler_id}", "get_server_capabilities")),
    *(f"/api/v1/{name}" for name in ("sessions", "sessions/{session_id}", "healthz")),
    *(f"/api/v1/{name}" for name in ("training_runs", "training_runs/{model_id}", "checkpoints")),
    *("/api/v1/downloads/{token}/{name:path}", _CHECKPOINTS),
    f"{_CHECKPOINTS}/external_weights/{{name}}/external_weights_urls",
)
_rest = functools.partial(small, most=MAX_REST_BYTES)
LARGEST: Final[dict[str, Entry]] = {
    f"POST {_RUN}/groups": groups,
    f"POST {_RUN}/turns": turns,
    f"POST {_RUN}/trajectories": trajectories,
    f"POST {_RUN}/rewards": rewards,
    f"POST {_RUN}/prompts": prompts,
    f"POST {_RUN}/tasks/end": tasks_end,
    f"POST {_RUN}/sessions": sessions,
    "POST /api/v1/forward_backward": training,
    "POST /api/v1/forward": training,
    "POST /api/v1/asample": sample,
    "POST /v1/runs": _rest,
    f"PATCH {_RUN}/config": _rest,
    **{f"POST {_RUN}/{name}": _rest for name in ("pause", "close", "tasks", "refills", "versions")},
    **{f"POST /api/v1/{name}": small for name in _SMALL},
    f"PUT {_CHECKPOINTS}/{{kind}}/{{name}}/ttl": small,
    **{f"GET {path}": plain for path in _PLAIN},
    "GET /v1/runs": reads(query=[f"limit={MAX_RUNS}"]),
    f"GET {_RUN}": reads(query=[""]),
    f"GET {_RUN}/config": reads(query=[""]),
    f"GET {_RUN}/credit": reads(query=[""]),
    f"GET {_RUN}/ledger": reads(query=["", "state=filtered", "state=open"]),
    f"GET {_RUN}/batches": reads(query=["from_step=1&limit=100"]),
    f"GET {_RUN}/batches/{{step}}": reads(step=[PLANNED, 1]),
    f"GET {_RUN}/versions": reads(query=["above=-1&limit=1000", f"above={2**53 - 2}"]),
    f"GET {_RUN}/waits": reads(query=[""]),
    f"GET {_RUN}/trajectories/{{group:path}}/{{sample}}": reads(
        group=["never", "task-1000-63", "task-383", "end-399-62", "large-3"],
        sample=[0, 7, 7, 3, 1],
        query=["attempt=2147483647", "", "", "", "attempt=0"],
    ),
    f"GET {_RUN}/events": events,
    f"POST {_RUN}/resume": plain,
    f"POST {_RUN}/reopen": plain,
    f"DELETE {_RUN}": deletion,
    "POST /v1/calls": calls,
    f"DELETE {_CHECKPOINTS}/{{kind}}/{{name}}": plain,
    f"POST {_CHECKPOINTS}/{{kind}}/{{name}}/publish": plain,
    f"DELETE {_CHECKPOINTS}/{{kind}}/{{name}}/publish": plain,
    **{
        f"{route}": entry
        for base in ("/openai", "/t/{run}/{group}/{sample}")
        for route, entry in (
            (f"POST {base}/v1/chat/completions", model_call),
            (f"POST {base}/v1/completions", model_call),
            (f"POST {base}/v1/responses", response_call),
            (f"POST {base}/v1/session/end", session_end),
            (f"GET {base}/v1/session", of_session),
            (f"GET {base}/v1/models", of_session),
        )
    },
    "POST /anthropic/v1/messages": message_call,
    "POST /anthropic/v1/messages/count_tokens": session_end,
    "GET /anthropic/v1/models": of_session,
}
"""The largest requests by method and path of their route."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    file = tmp_path_factory.mktemp("gateway") / "address"
    with (
        EmbeddedServer() as server,
        connect(server.url) as client,
        large_engine() as engine,
        GatewayProcess(server.url, file, "--engine", engine) as gateway,
        httpx2.Client(base_url=gateway.base_url, headers=_KEY, timeout=120) as http,
    ):
        register_base(client, BASE)
        post = functools.partial(_content, http)
        session = post("create_session")["session_id"]
        made = {"session_id": session, "base_model": BASE.name}
        model = post("create_model", **made, model_seq_id=0)["model_id"]
        opened = post("create_sampling_session", **made, sampling_session_seq_id=0)
        ids = (session, model, opened["sampling_session_id"])
        world = World(http, client, gateway, *ids, *_large_runs(client))
        warm = json.dumps({"items": [], "x": "-" * 300_000})  # starts the process that parses
        http.post(f"/v1/runs/{world.new_run()}/turns", content=warm, headers=_typed(ARROW[:0]))
        yield world


def _large_runs(client: redis.Redis) -> tuple[str, str]:
    """Write many runs, a large one and one of long events; return the names of the last two."""
    add_runs(client)
    settings = {"masked_reward": "leave_out", "mask_truncated": True}  # waits read every seal
    large = LargeRun(client, "large", reward_deadline_s=9.0, group_deadline_s=9.0, **settings)
    large.write()
    long = LargeRun(client, "long")
    long.add(long.keys.events, [longest_seal()] * LONG_EVENTS)
    return large.run, long.run


def _typed(content_type: str) -> dict[str, str]:
    return {"content-type": content_type or "application/json"}


def _content(http: httpx2.Client, route: str, **fields: Any) -> Any:
    answer = http.post(f"/api/v1/{route}", json=fields)
    assert answer.is_success, answer.text
    return answer.json()


def test_every_route_has_an_entry() -> None:
    routes = [" ".join(each) for each in routes_of(make_app(unused_gateway()).routes)]

    for route in routes:
        assert route in LARGEST, (
            f"route {route} has no entry: add its largest request to LARGEST in test_routes.py"
        )
    assert {*LARGEST} <= {*routes}, "LARGEST has a route that does not exist"


@pytest.mark.parametrize("route", LARGEST)
def test_largest_request_of_a_route_is_cheap(world: World, route: str) -> None:
    for number, sent in enumerate(LARGEST[route](world)):
        register_base(world.client, BASE)
        named = f"request {number} of {route}, of {len(sent.body)} bytes"
        with measured(world.gateway.pid) as costs:
            store_ms = _sent(world, route, sent)

        (cost,) = costs
        most_s = min(MOST.cpu_s, sent.slices * MOST_OF_SLICE_S) if sent.slices else MOST.cpu_s
        assert cost.cpu_s <= most_s, f"{named}: {cost.cpu_s:.2f} s of CPU time"
        assert cost.memory_mb <= MOST.memory_mb, f"{named}: {cost.memory_mb:.0f} MB of memory"
        if route.startswith("GET"):  # test_scripts.py has the scripts of the others
            tries = (_sent(world, route, sent) for _ in range(TRIES - 1))
            is_short = any(each <= MOST_OF_STORE_MS for each in itertools.chain([store_ms], tries))
            assert is_short, f"{named}: a command of {store_ms:.0f} ms"


def _sent(world: World, route: str, sent: Sent) -> float:
    """Send a request; return the time of the longest command in the store in ms, at most.

    Its CPU time is below its duration, and below that of all commands.
    """
    method, path = route.split(" ")
    url = re.sub(r"\{(\w+)[^}]*\}", lambda found: str(sent.path[found[1]]), path)
    world.client.slowlog_reset()
    before_ms = cpu_ms(world.client)
    headers = _typed(sent.content_type)
    if sent.key and path.startswith(("/openai", "/anthropic")):
        headers |= {"X-API-Key": sent.key}
    url = f"{url}?{sent.query}" if sent.query else url
    with world.http.stream(method, url, content=sent.body, headers=headers) as answer:
        if sent.events:
            named = (line for line in answer.iter_lines() if line.startswith("event:"))
            assert len([*itertools.islice(named, sent.events)]) == sent.events
        else:
            answer.read()
            accepted = (*sent.accepted, *(ANY if not sent.body and not sent.query else ()))
            assert answer.status_code in accepted, answer.text
    slow: Any = world.client.slowlog_get(100)
    longest_ms = max((each["duration"] for each in slow), default=0) / 1_000
    return min(longest_ms, cpu_ms(world.client) - before_ms)
