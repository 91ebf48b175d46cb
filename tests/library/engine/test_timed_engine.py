"""The timed engine: a latency model's seconds, the fake engine's tokens."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.factory import build_engine, timed_runner
from kaveri.engine.settings import EngineSettings
from kaveri.engine.stepwise.fake import FakeModel, FakeRunner
from kaveri.engine.stepwise.runner import DrawnToken, SequenceSlice
from kaveri.engine.stepwise.timed import TimedRunner
from kaveri.errors import ConfigError
from kaveri.kv.tiers.pool import KvPool
from kaveri.latency.model import bundled_latency_models, load_latency_model

_PARAMS = ResolvedParams(max_tokens=100, seed=1)
_DOCUMENT = {
    "name": "made-up",
    "source": "this test",
    "prefill": {"step_s": 0.02, "token_s": 0.001, "token_squared_s": 0.0001},
    "decode": [
        {"min_batch": 1, "step_s": 0.03, "context_token_s": 0.0002, "request_s": 0.004},
        {"min_batch": 3, "step_s": 0.01, "context_token_s": 0.0001, "request_s": 0.002},
    ],
}


def part(start: int, count: int, blocks: tuple[int, ...] = (0,)) -> SequenceSlice:
    return SequenceSlice((1,) * count, start, blocks, True, 0, _PARAMS)


def written(folder: Path, document: object) -> str:
    path = folder / "latency.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def test_step_time_follows_tokens_context_and_batch(tmp_path: Path) -> None:
    model = load_latency_model(written(tmp_path, _DOCUMENT))
    assert model.step_s([(0, 10), (0, 5)]) == pytest.approx(0.02 + 15 * 0.001 + 125 * 0.0001)
    assert model.step_s([(9, 1), (19, 1)]) == pytest.approx(0.03 + 30 * 0.0002 + 2 * 0.004)
    assert model.step_s([(9, 1)] * 3) == pytest.approx(0.01 + 30 * 0.0001 + 3 * 0.002), "the fit for large batches"
    mixed = model.step_s([(0, 10), (9, 1)])
    assert mixed == pytest.approx(0.03 + 10 * 0.001 + 100 * 0.0001 + 10 * 0.0002 + 0.004), "one constant, the larger"


def test_chunks_of_a_prompt_take_together_what_it_takes_whole_but_for_the_constant(tmp_path: Path) -> None:
    model = load_latency_model(written(tmp_path, _DOCUMENT))
    chunks = [(0, 30), (30, 30), (60, 17)]
    assert sum(model.step_s([chunk]) - 0.02 for chunk in chunks) == pytest.approx(model.step_s([(0, 77)]) - 0.02)


def test_bundled_opt_13b_is_distserves_fit() -> None:
    assert {"opt-13b-a100-tp1", "opt-66b-a100-tp4"} <= set(bundled_latency_models())
    for name in bundled_latency_models():
        assert load_latency_model(name).name == name
    model = load_latency_model("opt-13b-a100-tp1")
    # In milliseconds 18.10 + 0.1019 * n + 7.12e-6 * n**2, and 19.93 + 0.000627 * context + 0.0385 * batch.
    assert model.step_s([(0, 512)]) == pytest.approx(0.07215, rel=1e-3)
    assert model.step_s([(999, 1)] * 32) == pytest.approx(0.04123, rel=1e-3)


def _without_a_field() -> dict[str, Any]:
    return {**_DOCUMENT, "prefill": {"step_s": 0.02, "token_s": 0.001}}


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ([], "the file"),
        pytest.param("[" * 100_000, "is no latency model", id="nested"),
        (_without_a_field(), "prefill has"),
        ({**_DOCUMENT, "source": 5}, "source"),
        ({**_DOCUMENT, "decode": []}, "decode"),
        ({**_DOCUMENT, "decode": _DOCUMENT["decode"][1:]}, "min_batch"),
        ({**_DOCUMENT, "prefill": {"step_s": -1, "token_s": 0, "token_squared_s": 0}}, "prefill.step_s"),
        ({**_DOCUMENT, "prefill": {"step_s": "1", "token_s": 0, "token_squared_s": 0}}, "prefill.step_s"),
    ],
)
def test_a_file_that_is_no_latency_model_is_refused_with_the_field(
    tmp_path: Path, document: object, complaint: str
) -> None:
    with pytest.raises(ConfigError, match="latency_model") as refused:
        load_latency_model(written(tmp_path, document))
    assert complaint in str(refused.value)


@pytest.mark.parametrize("name", ["", "no-such-model"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="opt-13b-a100-tp1"):
        build_engine(EngineSettings(engine="timed", latency_model=name))


def test_a_step_takes_the_models_time_and_draws_the_fake_models_tokens(tmp_path: Path) -> None:
    model = FakeModel(verify=False)
    latency = load_latency_model(written(tmp_path, _DOCUMENT))
    runner = TimedRunner(model, latency)
    runner.attach(KvPool(model.layout, 8))
    layers_s: list[float] = []
    started_s = time.monotonic()
    drawn = runner.run([part(0, 30, (0, 1))], lambda layer: layers_s.append(time.monotonic() - started_s))
    taken_s = time.monotonic() - started_s
    expected_s = latency.step_s([(0, 30)])
    assert expected_s <= taken_s
    assert layers_s[0] >= expected_s / 2
    assert layers_s[1] >= expected_s
    assert drawn[0] is not None
    assert drawn[0].token_id == model.answer((1,) * 30, 0, 1)[0]


@pytest.mark.parametrize("spans", [[(0, 30)], [(30, 1), (12, 1)], [(0, 30), (12, 1)]])
def test_a_slowed_model_takes_so_many_times_as_long(spans: list[tuple[int, int]]) -> None:
    latency = load_latency_model("opt-13b-a100-tp1")
    assert latency.slowed(2.5).step_s(spans) == pytest.approx(2.5 * latency.step_s(spans))
    runner = timed_runner(EngineSettings(engine="timed", latency_model="opt-13b-a100-tp1", time_scale=2.5))
    assert isinstance(runner, TimedRunner)
    assert runner.latency == latency.slowed(2.5)


def test_large_kv_changes_no_token() -> None:
    model = FakeModel(verify=False).of_kv(64 * 2**10)
    assert model.layout.token_bytes == 64 * 2**10
    runner = FakeRunner(model)
    runner.attach(KvPool(model.layout, 3))
    answer = model.answer((1,) * 30, 0, 4)
    drawn = runner.run([part(0, 30, (2, 1))], None)
    for index, token_id in enumerate(answer[:-1]):
        # The second of these tokens is the first of a block.
        drawn += runner.run([SequenceSlice((token_id,), 30 + index, (2, 1, 0), True, 1 + index, _PARAMS)], None)
    assert [token.token_id for token in drawn if isinstance(token, DrawnToken)] == answer


def test_the_factory_builds_it_with_blocks_as_any_engine() -> None:
    engine = build_engine(
        EngineSettings(engine="timed", latency_model="opt-13b-a100-tp1", kv_cache_memory=57_344 * 256)
    )
    assert engine.info.engine == "timed"
    assert engine.info.total_blocks * engine.info.layout.block_tokens == 57_344
    engine.close()
