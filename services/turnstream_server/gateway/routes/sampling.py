"""Sampling sessions, and samples."""

from __future__ import annotations

import functools
from typing import Annotated, Final

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field, StrictInt, StrictStr

from turnstream.errors import BatchingError, RecordError
from turnstream_server.gateway.bodies import Body, LargeBody, json_response
from turnstream_server.gateway.limits import check_sampling_limits
from turnstream_server.gateway.state import session_of
from turnstream_server.gateway.tinker.json_parts import Part, read_fields
from turnstream_server.gateway.tinker.sample_calls import SampleCall, Sampling, read_sample_call
from turnstream_server.gateway.tinker_caller import Authenticated, TinkerCaller
from turnstream_server.operations.checkpoints import CheckpointPath, folder_of
from turnstream_server.operations.keys import RequestId
from turnstream_server.operations.models import BaseModel
from turnstream_server.operations.results import Failure, value_or_failure
from turnstream_server.operations.samplers import (
    SamplerRecord,
    refuse_sample,
    submit_sample,
    write_sampler_async,
)
from turnstream_server.operations.sessions import add_member

router = APIRouter()

_MAX_SAMPLES: Final = 4_096
"""Most sequences of a call: its answer has an id for each."""


class _NewSampler(Part):
    session_id: StrictStr
    sampling_session_seq_id: Annotated[StrictInt, Field(ge=0, lt=2**63)]
    base_model: StrictStr | None = None
    model_path: StrictStr | None = None


@router.post("/create_sampling_session")
async def create_sampling_session(body: Body, caller: Authenticated) -> Response:
    """Make a sampling session from a checkpoint or a base model; a checkpoint wins."""
    sent = read_fields(body, _NewSampler)
    await caller.open_session(sent.session_id)
    record = await _record(caller, sent)
    await caller.gateway.bases.require_served(record.base_model)
    await add_member(caller.client, sent.session_id, record.sampler_id)
    await write_sampler_async(caller.client, record)
    answer = {"type": "create_sampling_session", "sampling_session_id": record.sampler_id}
    return json_response(answer)


@router.get("/samplers/{sampler_id}")
async def describe(sampler_id: str, caller: Authenticated) -> Response:
    """Return the base model and the checkpoint of a sampling session."""
    record = await caller.sampler(sampler_id)
    return json_response(
        {
            "sampler_id": sampler_id,
            "base_model": record.base_model,
            "model_path": record.model_path,
        }
    )


@router.post("/asample")
async def asample(body: LargeBody, caller: Authenticated) -> Response:
    """Queue a sample, and name each of its sequences."""
    parsers = caller.gateway.parsers
    call = await parsers.run(read_sample_call, body, owner=caller.owner, is_json=True)
    if call.num_samples > _MAX_SAMPLES:
        raise RecordError(f"num_samples is {call.num_samples}, expected {_MAX_SAMPLES} at most")
    record = await caller.sampler(call.sampling_session_id)
    await caller.open_session(session_of(record.sampler_id))
    base = await caller.gateway.bases.known(record.base_model)
    request_id = await _submit(caller, call, record, base)
    names = [f"{request_id}:{number}" for number in range(call.num_samples)]
    return json_response({"request_id": str(request_id), "sample_sequence_ids": names})


async def _submit(
    caller: TinkerCaller, call: SampleCall, record: SamplerRecord, base: BaseModel
) -> RequestId:
    sampling = call.sampling
    if isinstance(sampling, Sampling):
        sampling = value_or_failure(functools.partial(check_sampling_limits, sampling, base))
    if isinstance(sampling, Failure):
        return await refuse_sample(caller.client, record.sampler_id, call.seq_id, sampling)
    return await submit_sample(caller.client, record, call.seq_id, *sampling)


async def _record(caller: TinkerCaller, sent: _NewSampler) -> SamplerRecord:
    sampler_id = f"{sent.session_id}:sample:{sent.sampling_session_seq_id}"
    if sent.model_path is None:
        if sent.base_model is None:
            raise BatchingError("base_model and model_path are null, expected one of them")
        return SamplerRecord(sampler_id, sent.base_model, caller.owner)
    path = CheckpointPath.parse(sent.model_path)
    if path.kind == "external_weights":
        raise BatchingError(f"model_path is {sent.model_path!r}: external weights are not served")
    saved = await caller.shared_checkpoint(path)
    return SamplerRecord(
        sampler_id,
        saved.base_model,
        caller.owner,
        model_path=str(path),
        folder=str(folder_of(path)),
    )
