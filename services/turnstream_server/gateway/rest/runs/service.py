"""The service itself: `/v1/ping`, and the batchers from which trainers pull."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel, Field

from turnstream.http.problems import WIRE_VERSION
from turnstream.store.client.replies import translating
from turnstream.store.run.batchers import list_batchers
from turnstream_server.gateway.rest.caller import Known, Train

router = APIRouter(tags=["service"])


class Pong(BaseModel):
    """The gateway, its store and the key of the request are in order."""

    wire_version: int = Field(description="Highest version of `Turnstream-Wire`.", examples=[1])


class Batchers(BaseModel):
    """Batchers that are registered in the store."""

    batchers: list[str] = Field(
        description='gRPC addresses, the last registered first: "host:port", or '
        '"grpcs://host:port" with TLS.',
        examples=[["10.0.0.7:7600"]],
    )


@router.get("/ping", response_model=Pong, summary="Check the connection")
async def get_ping(caller: Known) -> Pong:
    """Check the key, and that the store answers. A key of any role may ask."""
    with translating():
        await caller.client.ping()
    return Pong(wire_version=WIRE_VERSION)


@router.get("/batchers", response_model=Batchers, summary="List batchers")
async def get_batchers(caller: Train) -> Response:
    """Return the addresses of all batchers; empty while none is registered."""
    return await caller.answer(Batchers, lambda client: Batchers(batchers=list_batchers(client)))
