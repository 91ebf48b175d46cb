"""Traces of requests over router, prefill and decode, with spans that agree with the reported timings."""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from kaveri import AsyncClient, SamplingParams
from kaveri.errors import Unavailable
from kaveri.telemetry.tracing import use_provider
from tests.services.conftest import eventually
from tests.services.prompts import prompt
from tests.services.session_client import SessionClient, SessionRouters, computed

WITHIN_S = 0.001


class SpanBox:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def __len__(self) -> int:
        return len(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def spans() -> Iterator[SpanBox]:
    box = SpanBox()
    use_provider(box.provider)
    yield box
    use_provider(None)


def seconds_of(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def parent_of(span: ReadableSpan, spans: list[ReadableSpan]) -> ReadableSpan:
    assert span.parent is not None
    (parent,) = [each for each in spans if each.context.span_id == span.parent.span_id]
    return parent


async def test_the_spans_of_a_request_are_one_trace_and_agree_with_its_account(
    cluster: Any, routers: SessionRouters, spans: SpanBox
) -> None:
    await cluster.prefill(fake_step_s=0.01, chunk_tokens=16)
    await cluster.decode(fake_step_s=0.01)
    await routers.start("router-0")
    client = SessionClient(prompt(1, 60), {"max_tokens": 20})
    await client.finish(routers.generate("router-0", client.message()))
    await eventually(lambda: len(spans.named("generate")) == 1, "the router has ended the request")
    assert client.last is not None
    timing = client.last.timing
    for name, account_s in {
        "prefill.queue": timing.prefill_queue_s,
        "prefill": timing.prefill_s,
        "kv.push": timing.kv_transfer_s,
        "decode.admission": timing.decode_queue_s,
        "decode": timing.decode_s,
    }.items():
        assert seconds_of(spans.one(name)) == pytest.approx(account_s, abs=WITHIN_S), name
    chunks = spans.named("prefill.chunk")
    assert [span.attributes["kaveri.tokens"] for span in chunks] == [16, 16, 16, 12]
    assert sum(map(seconds_of, chunks)) == pytest.approx(timing.prefill_s, abs=4 * WITHIN_S)
    whole = spans.one("generate")
    assert timing.e2e_s <= seconds_of(whole) + WITHIN_S
    assert whole.attributes["kaveri.completion_tokens"] == 20
    everything = spans.all()
    assert len({span.context.trace_id for span in everything}) == 1
    assert {span.name for span in everything if span.parent is None} == {"generate"}
    assert {parent_of(span, everything).name for span in everything if span.name not in ("generate", "attempt")} == {
        "generate",  # tokenize, place
        "attempt",
    }
    for span in everything:
        if span.parent is not None:
            began = parent_of(span, everything).start_time
            assert span.start_time >= began - WITHIN_S * 1e9, f"{span.name} begins before what it is below"


async def test_an_attempt_links_to_the_one_before_and_says_why_that_was_lost(
    cluster: Any, routers: SessionRouters, spans: SpanBox
) -> None:
    prefill = await cluster.prefill(fake_step_s=0.03, chunk_tokens=16)
    await cluster.decode()
    await routers.start("router-0")
    client = SessionClient(prompt(2, 200), {"max_tokens": 5})
    call = routers.generate("router-0", client.message())
    await eventually(lambda: computed(cluster) >= 32, "it is computed")
    await cluster.prefill("prefill-1")
    prefill.host.break_off("it is killed")
    await client.finish(call)
    await eventually(lambda: len(spans.named("generate")) == 1, "the router has ended the request")
    lost, served = spans.named("attempt")
    assert not lost.status.is_ok
    assert served.status.status_code is otel.StatusCode.UNSET
    assert [link.context.span_id for link in served.links] == [lost.context.span_id]
    assert served.attributes["kaveri.prefill_instance_id"] == "prefill-1"
    assert len(spans.named("place")) == 2


async def test_a_callers_span_is_the_parent_and_its_sampling_is_followed(
    cluster: Any, routers: SessionRouters, spans: SpanBox
) -> None:
    await cluster.prefill()
    await cluster.decode()
    router = await routers.start("router-0")
    tracer = spans.provider.get_tracer("an application")
    async with AsyncClient(routers.address("router-0")) as client:
        with tracer.start_as_current_span("the caller's work") as work:
            await client.generate(prompt_token_ids=prompt(3), params=SamplingParams(max_tokens=3))
        await eventually(lambda: len(spans.named("generate")) == 1, "the router has ended the request")
        assert parent_of(spans.one("generate"), spans.all()).name == "the caller's work"
        assert spans.one("decode").context.trace_id == work.get_span_context().trace_id
        before = len(spans)
        unsampled = TracerProvider(sampler=ParentBased(ALWAYS_OFF)).get_tracer("an application")
        with unsampled.start_as_current_span("work that is left out"):
            await client.generate(prompt_token_ids=prompt(4), params=SamplingParams(max_tokens=3))
        await eventually(lambda: not len(router.table), "the router has ended the request")
        assert len(spans) == before


@pytest.mark.parametrize("sent", ["", "00-zz-1-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 5000])
async def test_a_traceparent_that_is_none_begins_a_trace_of_its_own(
    cluster: Any, routers: SessionRouters, spans: SpanBox, sent: str
) -> None:
    await cluster.prefill()
    await cluster.decode()
    await routers.start("router-0")
    client = SessionClient(prompt(5), {"max_tokens": 3})
    await client.finish(routers.generate("router-0", client.message(), metadata=(("traceparent", sent),)))
    await eventually(lambda: len(spans.named("generate")) == 1, "the router has ended the request")
    assert spans.one("generate").parent is None
    assert spans.one("decode").context.trace_id == spans.one("generate").context.trace_id


async def test_a_request_that_fails_says_so_in_its_span(cluster: Any, routers: SessionRouters, spans: SpanBox) -> None:
    await routers.start("router-0", unavailable_after_s=0.05)
    async with AsyncClient(routers.address("router-0")) as client:
        with pytest.raises(Unavailable):
            await client.generate(prompt_token_ids=prompt(6), params=SamplingParams(max_tokens=3))
    await eventually(lambda: len(spans.named("generate")) == 1, "the router has ended the request")
    failed = spans.one("generate")
    assert not failed.status.is_ok
    assert "no prefill instance serves" in str(failed.status.description)


async def test_nothing_is_sent_or_written_where_nothing_is_traced(cluster: Any, routers: SessionRouters) -> None:
    prefill = await cluster.prefill()
    await cluster.decode()
    await routers.start("router-0")
    accept, sent = prefill.service.accept, []

    def accept_and_note(*, traceparent: str, **given: Any) -> Any:
        sent.append(traceparent)
        return accept(traceparent=traceparent, **given)

    prefill.service.accept = accept_and_note
    client = SessionClient(prompt(7), {"max_tokens": 3})
    metadata = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)
    await client.finish(routers.generate("router-0", client.message(), metadata=metadata))
    assert sent == [""]


async def test_a_search_that_finds_nothing_is_an_attempt_that_says_so(
    cluster: Any, routers: SessionRouters, spans: SpanBox
) -> None:
    await cluster.prefill()
    await cluster.decode()
    await routers.start("router-0")
    client = SessionClient(prompt(8), {"max_tokens": 3}, session=1, max_tokens=3)
    await client.finish(routers.generate("router-0", client.message()))
    await eventually(lambda: len(spans.named("generate")) == 1, "the router has ended the request")
    sought, served = spans.named("attempt")
    assert sought.status.description == "not found"
    assert served.status.is_unset
    assert [link.context.span_id for link in served.links] == [sought.context.span_id]


async def test_an_answer_that_its_client_leaves_is_no_failure_at_decode(
    cluster: Any, routers: SessionRouters, spans: SpanBox
) -> None:
    await cluster.prefill()
    await cluster.decode(fake_step_s=0.01)
    await routers.start("router-0")
    client = SessionClient(prompt(9), {"max_tokens": 400}, secret=b"")
    call = routers.generate("router-0", client.message())
    await client.read(call, 5)
    call.cancel()
    await eventually(lambda: bool(spans.named("decode") and spans.named("generate")), "both have ended it")
    assert spans.one("decode").status.is_unset
    assert spans.one("decode").attributes["kaveri.outcome"] == "aborted"
    assert spans.one("generate").status.description == "the client has gone, or the process ends"


async def test_an_instance_of_both_phases_pushes_nothing_and_its_requests_wait_for_no_room(
    cluster: Any, routers: SessionRouters, spans: SpanBox
) -> None:
    await cluster.colocated(fake_step_s=0.01)
    await routers.start("router-0")
    for number, max_tokens in enumerate((5, 400)):
        client = SessionClient(prompt(10), {"max_tokens": max_tokens}, request_id=f"{number}", secret=b"")
        call = routers.generate("router-0", client.message())
        await client.read(call, 5)
        call.cancel()
        await eventually(lambda count=number: len(spans.named("decode")) > count, "it has ended")  # type: ignore[misc]
    assert not spans.named("kv.push")
    assert not spans.named("decode.room")
    assert [span.attributes["kaveri.outcome"] for span in spans.named("decode")] == ["finished", "aborted"]
