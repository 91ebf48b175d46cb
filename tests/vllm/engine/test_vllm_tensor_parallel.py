"""vLLM engines of two ranks, each a process that pushes and receives the KV of its own heads."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kaveri.engine.contract import KvPushed, Landed
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.testing.engine_conformance import Pair, make_request
from kaveri.testing.engine_recorder import EngineRecorder, wait_until_free
from tests.support.plain_transformers import PlainTransformers

# The first test loads vLLM six times: two engines and their ranks.
pytestmark = pytest.mark.timeout(600)

_BLOCKS = 60


@contextmanager
def running_pair(prefills: Any, decodes: Any, folder: Path, transport: str) -> Iterator[Pair]:
    address = str(folder / "kv.sock") if transport in ("shm", "unix") else "127.0.0.1:0"
    with ExitStack() as stack:
        prefill = prefills.lend().open(total_blocks=_BLOCKS, max_batch=1, transports=[transport])
        stack.callback(prefill.close)
        decode = decodes.lend().open(
            total_blocks=_BLOCKS, max_batch=4, listen=[KvEndpoint(transport, address)], transports=[transport]
        )
        stack.callback(decode.close)
        prefilled, decoded = EngineRecorder(), EngineRecorder()
        decoded.on_event = lambda event: decode.admit(event.key) if isinstance(event, Landed) else None
        prefill.start(prefilled)
        decode.start(decoded)
        yield Pair(prefill, decode, prefilled, decoded)


@pytest.mark.parametrize(
    ("sending", "receiving", "transport"),
    [
        *(("two_rank_prefills", "two_rank_decodes", transport) for transport in ("shm", "tcp", "gloo", "nixl")),
        ("two_rank_prefills", "decodes", "shm"),
        ("two_rank_prefills", "decodes", "tcp"),
        ("prefills", "two_rank_decodes", "shm"),
        ("prefills", "two_rank_decodes", "tcp"),
        ("mirrored_two_rank_prefills", "mirrored_decodes", "shm"),
        ("mirrored_two_rank_prefills", "mirrored_two_rank_decodes", "shm"),
    ],
)
def test_each_rank_pushes_its_heads_to_those_that_hold_them(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    reference: PlainTransformers,
    sending: str,
    receiving: str,
    transport: str,
) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu13")
    lenders = request.getfixturevalue(sending), request.getfixturevalue(receiving)
    with running_pair(*lenders, tmp_path, transport) as pair:
        requests = [make_request(pair.prefill, f"{transport}{length}", length, 6) for length in (1, 32, 33, 90)]
        for each in requests:
            pair.hand_over(each)
        for each in requests:
            assert pair.answer(each) == reference.answer(each.token_ids, 6)
            pushed = pair.prefilled.wait_for(KvPushed, each.key)
            layout = pair.decode.info.layout
            assert pushed.kv_bytes == layout.block_count(len(each.token_ids)) * layout.layer_count * layout.block_bytes
        wait_until_free(pair.prefill, pair.decode)
