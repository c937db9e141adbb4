"""Traces by OpenTelemetry, where OTEL_EXPORTER_OTLP_ENDPOINT names a collector.

Without that variable nothing is imported, and `span` does nothing. All spans of one step of a run
are one trace, in every service: its id follows from both. So the trace has the planning of a batch
and the step of the trainer, without a message between them. The request that a span belongs to is a
link of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import Any, Final

from turnstream.optional import from_extra

VARIABLES: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""OpenTelemetry defines these names and reads them itself, with further ones."""

_tracer: Any = None


def start_tracing(service: str) -> None:
    """Send the spans of this process until its end, if the environment names a collector.

    Raises:
        MissingExtraError: OpenTelemetry is not installed.
    """
    global _tracer
    if not any(os.environ.get(name) for name in VARIABLES):
        return
    with from_extra("tracing", needed_by=VARIABLES[0], distribution="turnstream-server"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": f"turnstream-{service}"}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _tracer = provider.get_tracer("turnstream")


@contextlib.contextmanager
def span(
    name: str, *, traceparent: str | None = None, run: str = "", step: int = 0, **attributes: Any
) -> Iterator[Any]:
    """Record the block as a span; yield it, or None without a collector.

    Args:
        name: without ids.
        traceparent: header of the request that is answered, by W3C Trace Context: its span becomes
            the parent. "" for a request without it, None for a part of something.
        run: name of a run; with a step, the span belongs to the trace of the step.
        step: number of the step, from 1; the span links the request.
        attributes: facts; None is left out.
    """
    if _tracer is None:
        yield None
        return
    from opentelemetry.trace import Link, SpanKind, get_current_span

    context, links, kind = None, [], SpanKind.INTERNAL
    if traceparent is not None:
        context, kind = _context_of(traceparent), SpanKind.SERVER
    if step:
        current = get_current_span(context).get_span_context()
        links = [Link(current)] if current.is_valid else []
        context = _step_context(run, step)
        attributes |= {"turnstream.run": run, "turnstream.step": step}
    facts = {name: value for name, value in attributes.items() if value is not None}
    with _tracer.start_as_current_span(
        name, context=context, links=links, kind=kind, attributes=facts
    ) as made:
        yield made


def _context_of(traceparent: str) -> Any:
    """Return the context of a header; an empty one for a wrong header."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})


def _step_context(run: str, step: int) -> Any:
    """Return the context of a step: the same ids in every process."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    digest = hashlib.sha256(f"{run}\n{step}".encode()).digest()
    trace_id, span_id = int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])
    flags = TraceFlags(TraceFlags.SAMPLED)
    own = SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(own))
