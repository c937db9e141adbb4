"""A worker without a model: it runs the real logs, with results that are easy to check."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, Self

import numpy as np
import redis

from turnstream.errors import RejectedError, RunNotFoundError, UnavailableError
from turnstream.store.client.connection import connect
from turnstream_server.models.sampling_params import SampledSequence, SampleResult, StopReason
from turnstream_server.operations.checkpoints import (
    CheckpointPath,
    SavedCheckpoint,
    read_shared,
    write_checkpoint,
)
from turnstream_server.operations.contents import (
    CreateModel,
    ForwardBackwardRun,
    LoadWeights,
    OptimStep,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    decode_content,
)
from turnstream_server.operations.keys import RequestId
from turnstream_server.operations.log import ModelLog, Run
from turnstream_server.operations.models import (
    BaseModel,
    ModelRecord,
    models_of_base,
    read_model,
    register_base,
)
from turnstream_server.operations.operation_records import decode_operation
from turnstream_server.operations.results import Answer, Failure, Result, TrainingOutput
from turnstream_server.operations.samplers import (
    SampleQueue,
    SampleRequest,
    SamplerRecord,
    write_sampler,
)

BASE = BaseModel("tiny/byte", context_length=128, vocab_size=300, tokenizer_id="", max_rank=64)

_PAUSE_S = 0.01


class CannedWorker:
    """A thread that runs every command and sample of one base model.

    - A log-probability of a training call is minus the target token; `loss:sum` is minus their sum.
    - A sample repeats the last token of its prompt, `max_tokens` times, at log-probability -1.

    Attributes:
        ran: request ids of the commands in the order in which they ran.
        may_run: cleared, it holds all commands and samples back.
    """

    def __init__(self, url: str, base: BaseModel = BASE) -> None:
        self._url = url
        self._base = base
        self.ran: list[str] = []
        self.may_run = threading.Event()
        self.may_run.set()
        self._ends = threading.Event()
        self._logs: dict[str, ModelLog] = {}
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        with connect(self._url) as client:
            register_base(client, self._base)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _work(self) -> None:
        with connect(self._url) as client:
            queue = SampleQueue(client, self._base.name, sampler="canned")
            while not self._ends.wait(_PAUSE_S):
                with contextlib.suppress(UnavailableError):
                    register_base(client, self._base)
                    if self.may_run.is_set():
                        self._run_commands(client)
                        for sample in queue.read(block=False):
                            queue.finish(sample, _sample(sample))

    def _run_commands(self, client: redis.Redis) -> None:
        for model_id in models_of_base(client, self._base.name):
            try:
                self._run_model(client, model_id)
            except RejectedError:
                self._logs.pop(model_id, None)

    def _run_model(self, client: redis.Redis, model_id: str) -> None:
        log = self._logs.get(model_id)
        if log is None:
            log = ModelLog.acquire(client, model_id, worker="canned", lease_s=60)
            self._logs[model_id] = log
        work = log.take()
        if isinstance(work, Run):
            model, bodies = read_model(client, model_id), log.read(work.numbers)
            results = {
                number: _result(client, model, RequestId(model_id, number), work.kind, body)
                for number, body in bodies.items()
            }
            self.ran += [str(RequestId(model_id, number)) for number in sorted(results)]
            log.finish(results)


def _result(
    client: redis.Redis, model: ModelRecord, request_id: RequestId, kind: str, body: bytes
) -> Result:
    if kind in ("forward", "forward_backward"):
        data = decode_operation(body, request_id=str(request_id)).data
        logprobs = [-each.target_tokens.astype(np.float32) for each in data]
        return TrainingOutput(logprobs, {"loss:sum": -float(sum(each.sum() for each in logprobs))})
    content = decode_content(kind, body)
    match content:
        case CreateModel():
            kind = "create_model" if content.path is None else "load_weights"
            return Answer({"type": kind, "model_id": model.model_id})
        case ForwardBackwardRun():
            return Answer(content._asdict())
        case OptimStep():
            return Answer({"metrics": {"learning_rate": content.learning_rate}})
        case LoadWeights():
            return _load(client, model, content.path)
        case SaveWeights():
            path = CheckpointPath(model.model_id, "weights", content.name)
            return _save(client, model, path, request_id, content.ttl_seconds)
        case SaveExternal():
            path = CheckpointPath(model.model_id, "external_weights", content.name)
            return _save(client, model, path, request_id, content.ttl_seconds)
        case SaveForSampler():
            if content.sampling_session_seq_id is None:
                path = CheckpointPath(model.model_id, "sampler_weights", content.name)
                return _save(client, model, path, request_id, content.ttl_seconds)
            session = model.model_id.partition(":")[0]
            sampler_id = f"{session}:sample:{content.sampling_session_seq_id}"
            record = SamplerRecord(sampler_id, model.base_model, model.owner, folder="saved/x")
            write_sampler(client, record)
            return Answer({"sampling_session_id": sampler_id})
    return Failure(f"no result for {kind}", "server")


def _load(client: redis.Redis, model: ModelRecord, path: CheckpointPath) -> Answer | Failure:
    try:
        read_shared(client, model.owner, path)
    except RunNotFoundError as error:
        return Failure(str(error), "user")
    return Answer({"path": str(path), "model_id": model.model_id})


def _save(
    client: redis.Redis,
    model: ModelRecord,
    path: CheckpointPath,
    request_id: RequestId,
    ttl_seconds: int | None,
) -> Answer:
    now_ms = round(time.time() * 1000)
    layers: dict[str, Any] = {
        name: getattr(model, name) for name in ("train_attn", "train_mlp", "train_unembed")
    }
    saved = SavedCheckpoint(
        path=path,
        request_id=str(request_id),
        base_model=model.base_model,
        lora_rank=model.lora_rank,
        created_ms=now_ms,
        expires_ms=None if ttl_seconds is None else now_ms + ttl_seconds * 1000,
        size_bytes=10,
        **layers,
    )
    write_checkpoint(client, model.owner, saved)
    return Answer({"path": str(path)})


def _sample(sample: SampleRequest) -> SampleResult:
    count = sample.params.max_tokens or 1
    sequence = SampledSequence(
        token_ids=np.full(count, sample.prompt[-1], np.int32),
        logprobs=np.full(count, -1.0, np.float32),
        stop_reason=StopReason.LENGTH,
        version_runs=((0, count),),
    )
    prompt_logprobs = -sample.prompt.astype(np.float32)
    prompt_logprobs[0] = np.nan
    return SampleResult(
        sequences=(sequence,) * sample.params.num_samples,
        prompt_logprobs=prompt_logprobs if sample.params.prompt_logprobs else None,
    )
