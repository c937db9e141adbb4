"""Routes for those who watch the process: /healthz, /readyz and /metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from turnstream_server.gateway.bodies import json_response
from turnstream_server.gateway.state import Gateway
from turnstream_server.gateway.tinker_caller import require_role
from turnstream_server.telemetry.instruments import REGISTRY

router = APIRouter()


@router.get("/healthz")
async def healthz() -> Response:
    """Return that the process lives. It needs no key."""
    return json_response({"alive": True})


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """Return the state of the dependencies; 503 if a needed one is not ready. It needs no key."""
    gateway: Gateway = request.app.state.gateway
    status, body = await asyncio.to_thread(gateway.options.readiness.answer)
    return Response(body, status, media_type="application/json")


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics of this process for Prometheus; the key needs the role `read`."""
    require_role(request, "read")
    shown = await asyncio.to_thread(generate_latest, REGISTRY)
    return Response(shown, media_type=CONTENT_TYPE_LATEST)
