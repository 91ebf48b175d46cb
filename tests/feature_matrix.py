"""Asks for features in every way and under every disturbance, and compares each answer with an undisturbed one.

    python -m tests.feature_matrix --engine kaveri-tiny --seed 1 --cells 300

A cell is a set of features, a door (SDK, gRPC, HTTP), greedy or seeded, whole or streamed, and what happens meanwhile.
Cells cover all pairs of these, drawn by the seed. Clients of plain gRPC cannot go on at another router: those cells are
left out.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx2

from kaveri import AsyncClient, ChatOptions, Grammar, SamplingParams
from kaveri.cli.flip import flip_instance
from kaveri.client.answer import Completion
from kaveri.client.request import build_request
from kaveri.domain.sampling import FinishReason
from kaveri.domain.view import ClusterView, Phase
from kaveri.errors import KaveriError
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.parsers.parts import Content, Part, Reasoning, ToolCall
from kaveri.v1 import inference_pb2_grpc
from kaveri.wire.messages import FINISH_FROM_PROTO, form_from_proto
from tests.kill_matrix.cluster import ENGINES
from tests.support.local_cluster import LocalCluster
from tests.support.metrics_pages import read_page
from tests.support.redis_fixture import free_port
from tests.support.thinking_model import THINK_END_ID, write_thinking_model

MESSAGES = [{"role": "user", "content": "Count from 1 to 9."}]
_ITEM = {"properties": {"n": {"type": "integer"}, "s": {"enum": ["aa", "bb", "cc"]}}, "required": ["n", "s"]}
_ITEMS = Grammar.json_schema({"type": "array", "items": {"type": "object", **_ITEM}, "minItems": 12, "maxItems": 14})
_NUMBERS = Grammar.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 40, "maxItems": 50})
_WORDS = Grammar.regex("([a-z]{2,8} ){30,40}end")
_BRACKETS = Grammar.lark('start: ("[" WORD "]"){30,40}\nWORD: /[a-z]{2,6}/')
_TOOL_PARAMETERS = {
    "type": "object",
    "properties": {"days": {"type": "array", "items": {"type": "integer"}, "minItems": 25, "maxItems": 30}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": _TOOL_PARAMETERS}} for name in ("plan", "rest")]
_REQUIRED = ChatOptions(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
_CHOICES = Grammar.choices([" ".join(f"{word} {number}" for number in range(20)) for word in ("up", "down", "left")])
_THINKS = {"enable_thinking": True}
_LESS_THAN = 33
"""Token of "<", with which a call begins."""
_THOUGHT = {"logit_bias": {THINK_END_ID: 9.0}, "frequency_penalty": 0.6}
"""The longer it thinks, the likelier it ends."""
_FREE: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True}
_PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
FEATURES: dict[str, tuple[dict[str, Any], ChatOptions | None]] = {
    "penalties": ({**_FREE, **_PENALTIES}, None),
    "min_p, bias": ({**_FREE, "min_p": 0.02, "logit_bias": {400: 3.0, 401: -100.0}}, None),
    "bad words, allowed": ({**_FREE, "bad_words": ("the", "a b"), "allowed_token_ids": tuple(range(260, 700))}, None),
    "penalties, bias, min_tokens": ({**_FREE, **_PENALTIES, "min_tokens": 60, "logit_bias": {300: 2.0}}, None),
    "schema": ({"max_tokens": 400, "grammar": _ITEMS}, None),
    "schema, penalties": ({"max_tokens": 400, "frequency_penalty": 0.3, "grammar": _NUMBERS}, None),
    "regex, bias, min_tokens": (
        {"max_tokens": 300, "min_tokens": 40, "logit_bias": {320: 1.0}, "grammar": _WORDS},
        None,
    ),
    "grammar": ({"max_tokens": 300, "grammar": _BRACKETS}, None),
    "tools required": ({"max_tokens": 400}, _REQUIRED),
    "tools required, penalties": ({"max_tokens": 400, "presence_penalty": 0.4}, _REQUIRED),
    "tools, schema": ({"max_tokens": 400, "grammar": _ITEMS}, ChatOptions(tools=TOOLS)),
    "tools auto, stop": ({**_FREE, "stop": ("zzzz",)}, ChatOptions(tools=TOOLS)),
    "tools auto, a call": (
        {"max_tokens": 400, "grammar": _ITEMS, "logit_bias": {_LESS_THAN: 50.0}},
        ChatOptions(tools=TOOLS),
    ),
    "a named tool": ({"max_tokens": 400}, ChatOptions(tools=TOOLS, tool_choice="rest")),
    "choice, logprobs": ({"max_tokens": 200, "grammar": _CHOICES, "logprobs": 2}, None),
    "json object": ({"max_tokens": 150, "grammar": Grammar.json_object()}, None),
    "reasoning": ({**_FREE, **_THOUGHT}, ChatOptions(template_arguments=_THINKS)),
    "reasoning, schema": ({"max_tokens": 500, "grammar": _ITEMS, **_THOUGHT}, ChatOptions(template_arguments=_THINKS)),
    "reasoning, tools required": (
        {"max_tokens": 500, **_THOUGHT},
        replace(_REQUIRED, template_arguments=_THINKS),
    ),
}
DOORS = ("SDK", "gRPC", "HTTP")
DRAWS = ("greedy", "seeded")
FORMS = ("whole", "streamed")
DISTURBANCES = ("none", "decode killed, copy", "decode killed", "drained", "flipped", "router killed", "preempted")
ROUTERS = ("router-0", "router-1")
DECODES = ("decode-0", "decode-1")
_WITHIN_S = 240.0
_BURDENS = 10
"""Requests that nearly fill the pools of two decode instances: with one more they run out of blocks."""


@dataclass(frozen=True, slots=True)
class Cell:
    features: str
    door: str
    draws: str
    form: str
    disturbance: str

    @property
    def pairs(self) -> set[tuple[Any, ...]]:
        values = enumerate((self.features, self.door, self.draws, self.form, self.disturbance))
        return set(itertools.combinations(values, 2))

    @property
    def is_possible(self) -> bool:
        return not (self.door == "gRPC" and self.disturbance == "router killed")


def draw_cells(seed: int, count: int) -> list[Cell]:
    """Cells that cover all pairs as far as possible, then others."""
    rng = random.Random(seed)
    every = [Cell(*each) for each in itertools.product(FEATURES, DOORS, DRAWS, FORMS, DISTURBANCES)]
    possible = [cell for cell in every if cell.is_possible]
    left = set().union(*(cell.pairs for cell in possible))
    cells: list[Cell] = []
    while len(cells) < count:
        chosen = max(rng.sample(possible, 60), key=lambda cell: len(cell.pairs & left))
        left -= chosen.pairs
        cells.append(chosen)
        possible.remove(chosen)
    assert not left or count < 150, f"{len(left)} pairs are not covered"
    # Clusters with and without copies.
    return sorted(cells, key=lambda cell: cell.disturbance == "decode killed")


@dataclass(frozen=True, slots=True)
class Answer:
    """What is compared: texts, calls without their ids, how many tokens there are and why they end."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    tokens: int
    finish: str

    @classmethod
    def of(cls, completion: Completion) -> "Answer":
        calls = tuple((call.name, call.arguments) for call in completion.tool_calls)
        tokens, finish = len(completion.token_ids), str(completion.finish_reason)
        return cls(completion.content, completion.reasoning, calls, tokens, finish)

    @classmethod
    def of_parts(cls, parts: list[Part], tokens: int, finish: object) -> "Answer":
        return cls(
            "".join(part.text for part in parts if isinstance(part, Content)),
            "".join(part.text for part in parts if isinstance(part, Reasoning)),
            tuple((part.name, part.arguments) for part in parts if isinstance(part, ToolCall)),
            tokens,
            str(finish),
        )

    @classmethod
    def of_messages(cls, messages: list[dict[str, Any]], tokens: int, finish: str) -> "Answer":
        """messages: of OpenAI's API, whole or deltas."""
        calls = [call["function"] for message in messages for call in message.get("tool_calls") or []]
        return cls(
            "".join(message.get("content") or "" for message in messages),
            "".join(message.get("reasoning_content") or "" for message in messages),
            tuple((call["name"], call["arguments"]) for call in calls),
            tokens,
            "stop" if finish == "tool_calls" else finish,
        )


def _params(cell: Cell) -> SamplingParams:
    given = FEATURES[cell.features][0]
    return SamplingParams(
        **{"temperature": 0.0} | given | ({"temperature": 1.0, "seed": 7} if cell.draws == "seeded" else {})
    )


class Asker:
    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.targets = ",".join(cluster.stack.targets)

    async def ask(self, cell: Cell, begun: asyncio.Event) -> Answer:
        """Ask in the cell's way. begun: set once tokens have come, or should have."""
        match cell.door:
            case "SDK":
                return await self._by_sdk(cell, begun)
            case "gRPC":
                return await self._by_grpc(cell, begun)
            case _:
                return await self._by_http(cell, begun)

    async def _by_sdk(self, cell: Cell, begun: asyncio.Event) -> Answer:
        async with AsyncClient(self.cluster.stack.targets, timeout_s=_WITHIN_S) as client:
            stream = client.stream(messages=MESSAGES, chat=FEATURES[cell.features][1], params=_params(cell))
            async with stream:
                if cell.form == "whole":
                    collecting = asyncio.create_task(stream.collect())
                    while not collecting.done() and stream.completion_tokens < 24:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    begun.set()
                    return Answer.of(await collecting)
                chunks = []
                async for chunk in stream:
                    chunks.append(chunk)
                    if stream.completion_tokens >= 24:
                        begun.set()
                text = "".join(chunk.text for chunk in chunks)
                parser = stream.answer_form.parser()
                parts = [*parser.feed(text), *parser.close()]
                return Answer.of_parts(parts, stream.completion_tokens, chunks[-1].finish_reason)

    async def _by_grpc(self, cell: Cell, begun: asyncio.Event) -> Answer:
        request = build_request(
            None, None, MESSAGES, _params(cell), None, f"grpc-{time.monotonic_ns()}", FEATURES[cell.features][1]
        )
        text, tokens, parser, finish = "", 0, None, FinishReason.CANCELLED
        async with grpc.aio.insecure_channel(self.cluster.stack.targets[0]) as channel:
            async for response in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=_WITHIN_S):
                if parser is None:
                    parser = form_from_proto(response.answer_form).parser()
                text += response.text
                tokens += len(response.token_ids)
                finish = FINISH_FROM_PROTO[response.finish_reason] or finish
                if tokens >= 24:
                    begun.set()
        assert parser is not None
        return Answer.of_parts([*parser.feed(text), *parser.close()], tokens, finish)

    async def _by_http(self, cell: Cell, begun: asyncio.Event) -> Answer:
        params, chat = _params(cell), FEATURES[cell.features][1]
        body: dict[str, Any] = {"messages": MESSAGES}
        if cell.form == "streamed":
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if params.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": params.logprobs}
        for name in ("max_tokens", "min_tokens", "temperature", "seed", "ignore_eos", "min_p", "repetition_penalty"):
            body[name] = getattr(params, name)
        body |= {"presence_penalty": params.presence_penalty, "frequency_penalty": params.frequency_penalty}
        body |= {"stop": list(params.stop), "bad_words": list(params.bad_words)}
        body |= {
            "allowed_token_ids": list(params.allowed_token_ids),
            "logit_bias": {str(k): v for k, v in params.logit_bias},
        }
        if params.grammar is not None:
            names = {"json_schema": "json", "regex": "regex", "lark": "grammar", "choices": "choice"}
            name, source = names[params.grammar.kind], params.grammar.source
            body["structured_outputs"] = {name: json.loads(source) if name in ("json", "choice") else source}
        if chat is not None and chat.tools:
            named = {"type": "function", "function": {"name": chat.tool_choice}}
            choice = chat.tool_choice if chat.tool_choice in ("auto", "required") else named
            body |= {"tools": TOOLS, "parallel_tool_calls": chat.parallel_tool_calls, "tool_choice": choice}
        if chat is not None and chat.template_arguments:
            body["chat_template_kwargs"] = chat.template_arguments
        url = f"http://{self.cluster.stack.http_targets[0]}/v1/chat/completions"
        async with httpx2.AsyncClient(timeout=_WITHIN_S) as client:
            if cell.form == "whole":
                waiting = asyncio.create_task(self._decodes(begun))
                answered = (await client.post(url, json=body)).json()
                waiting.cancel()
                choice, tokens = answered["choices"][0], answered["usage"]["completion_tokens"]
                return Answer.of_messages([choice["message"]], tokens, choice["finish_reason"])
            deltas, tokens, finish = [], 0, ""
            # A call comes in one event at its end.
            calls = chat is not None and bool(chat.tools)
            watching = asyncio.create_task(self._decodes(begun)) if calls else None
            async with client.stream("POST", url, json=body) as events:
                seen = 0
                async for line in events.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    seen += 1
                    if seen >= 12:
                        begun.set()
                    event = json.loads(line.removeprefix("data: "))
                    for choice in event["choices"]:
                        deltas.append(choice["delta"])
                        finish = choice["finish_reason"] or finish
                    if event.get("usage"):
                        tokens = event["usage"]["completion_tokens"]
            if watching is not None:
                watching.cancel()
            return Answer.of_messages(deltas, tokens, finish)

    async def _decodes(self, begun: asyncio.Event) -> None:
        """Set `begun` once 24 tokens are decoded."""
        before = await asyncio.to_thread(self.metric, "kaveri_decode_tokens_total", DECODES)
        while await asyncio.to_thread(self.metric, "kaveri_decode_tokens_total", DECODES) < before + 24:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        begun.set()

    def metric(self, name: str, instances: Sequence[str]) -> float:
        """The sum of a metric's samples over instances; 0 for one that is down."""
        found = 0.0
        for instance in instances:
            with contextlib.suppress(OSError):
                page = read_page(f"127.0.0.1:{self.cluster.stack.config.metrics_port_of(instance)}", timeout_s=5)
                starts = f"{name} ", f"{name}{{"
                found += sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(starts))
        return found

    def decoding(self) -> str | None:
        """The instance whose load says that it decodes."""
        for name, found in self.cluster.view().instances.items():
            if name.startswith("decode") and found.load is not None and found.load.running_requests:
                return name
        return None


def running_in(view: ClusterView) -> int:
    """Return how many requests decode."""
    loads = [found.load for name, found in view.instances.items() if name.startswith("decode")]
    return sum(load.running_requests for load in loads if load is not None)


class Matrix:
    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.asker = Asker(cluster)
        self.expected: dict[tuple[str, str], Answer] = {}
        self.account: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, cells: list[Cell]) -> None:
        for cell in cells:
            plain = replace(cell, door="SDK", form="whole", disturbance="none")
            key = cell.features, cell.draws
            if key not in self.expected:
                self.expected[key] = await self.asker.ask(plain, asyncio.Event())
            await self._try(cell)

    async def _try(self, cell: Cell) -> None:
        begun, load, preempted = asyncio.Event(), [], self._preemptions()
        if cell.disturbance == "preempted":
            load = [asyncio.create_task(self._burden(number)) for number in range(_BURDENS)]
            await self.cluster.wait_for_view(lambda view: running_in(view) >= _BURDENS - 2)
        asking = asyncio.create_task(self.asker.ask(cell, begun))
        if cell.disturbance not in ("none", "preempted"):
            waiting = asyncio.create_task(begun.wait())
            await asyncio.wait((asking, waiting), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            self.account["too late" if asking.done() else "disturbed"] += 1
            if not asking.done():
                await self._disturb(cell.disturbance)
        try:
            answer = await asking
        except (KaveriError, grpc.RpcError, httpx2.HTTPError, KeyError, ValueError) as error:
            self.wrong.append(f"{cell}: {error!r}"[:500])
        else:
            self.account["cells"] += 1
            if answer != self.expected[cell.features, cell.draws]:
                self.wrong.append(f"{cell}: {answer} is not {self.expected[cell.features, cell.draws]}"[:900])
        if cell.disturbance == "preempted":
            self.account["beside preemptions" if self._preemptions() > preempted else "without preemptions"] += 1
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
        await self.cluster.stack.wait_until_ready(240)

    def _preemptions(self) -> float:
        return self.asker.metric("kaveri_decode_preemptions_total", DECODES)

    async def _burden(self, number: int) -> None:
        """Long answers that take the small pools, so that others are preempted."""
        async with AsyncClient(self.cluster.stack.targets, timeout_s=_WITHIN_S) as client:
            params = SamplingParams(max_tokens=200, temperature=1.0, seed=number, ignore_eos=True)
            with contextlib.suppress(KaveriError):
                await client.generate(prompt_token_ids=[300 + number] * 850, params=params)

    async def _disturb(self, disturbance: str) -> None:
        cluster = self.cluster
        if disturbance == "router killed":
            in_flight = {name: self.asker.metric("kaveri_router_in_flight_requests", [name]) for name in ROUTERS}
            router = max(ROUTERS, key=in_flight.__getitem__)
            await cluster.kill(router)
            await cluster.restart(router, 240)
            return
        holder = self.asker.decoding()
        for _ in range(100):
            if holder is not None:
                break
            await asyncio.sleep(0.01)
            holder = self.asker.decoding()
        if holder is None:
            self.account["no holder seen"] += 1
            return
        if disturbance == "flipped":
            with contextlib.suppress(KaveriError):
                await flip_instance(holder, (Phase.PREFILL,), self.asker.targets)
                await asyncio.sleep(0.5)
                await flip_instance(holder, (Phase.DECODE,), self.asker.targets)
            return
        if disturbance == "drained":
            await cluster.stop(holder, 30)
        else:
            await cluster.kill(holder)
        await cluster.restart(holder, 240)


@contextlib.asynccontextmanager
async def _cluster(engine: str, model: str, *, copies: bool) -> AsyncIterator[LocalCluster]:
    settings: dict[str, Any] = {"router_count": 2, "prefill_count": 1, "decode_count": 2, "gateway_count": 1}
    settings |= {"model": model, "metrics_port": free_port()}
    settings |= {"start_timeout_s": 600.0, "drain_timeout_s": 30.0, "restart": False} | ENGINES[engine]
    if copies:
        settings |= {"replication": "spread", "replica_memory": "32MiB", "replica_min_tokens": "16"}
    async with LocalStack(StackConfig.of(**settings), report=lambda line: None) as stack:
        yield LocalCluster(stack)


async def run_cells(engine: str, cells: Sequence[Cell]) -> dict[str, Any]:
    """Run the cells; return the account."""
    account, wrong, began_s = Counter[str](), list[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model = write_thinking_model(Path(folder))
        for copies in (True, False):
            mine = [cell for cell in cells if (cell.disturbance != "decode killed") == copies]
            if not mine:
                continue
            async with _cluster(engine, model, copies=copies) as cluster:
                matrix = Matrix(cluster)
                await matrix.run(mine)
                account += matrix.account
                wrong += matrix.wrong
    return {"engine": engine, **account, "wrong": wrong, "seconds": round(time.monotonic() - began_s)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="kaveri-tiny")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cells", type=int, default=300)
    given = parser.parse_args()
    account = {"seed": given.seed} | asyncio.run(run_cells(given.engine, draw_cells(given.seed, given.cells)))
    print(json.dumps(account, indent=1))
    return int(bool(account["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
