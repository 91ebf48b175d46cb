from pathlib import Path

import pytest

pytest.importorskip("torch")

from kaveri.models import KAVERI_TINY, bundled_predictor
from kaveri.predictor.bundle import LengthPredictor
from kaveri.predictor.evaluate import evaluate
from kaveri.predictor.labels import Split, load_tokenizer, read_labels
from training.predictor.make_prompts import SHARES, make_prompts

ROOT = Path(__file__).resolve().parents[3]
HELD_OUT = ROOT / "training" / "predictor" / "held_out.jsonl"
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def predictor() -> LengthPredictor:
    return LengthPredictor.load(KAVERI_TINY)


def likeliest_range(predictor: LengthPredictor, prompt: str, chat: bool) -> tuple[int, int]:
    tokenizer = load_tokenizer(KAVERI_TINY)
    if chat:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    (row,) = predictor.predict([tokenizer.backend_tokenizer.encode(prompt, add_special_tokens=False).ids])
    found = predictor.range_of(max(range(predictor.bucket_count), key=row.__getitem__))
    return found.low, found.high


def test_it_is_small() -> None:
    folder = bundled_predictor(KAVERI_TINY)
    assert folder is not None
    assert sum(path.stat().st_size for path in Path(folder).rglob("*")) <= 4 * MEGABYTE


def test_a_model_without_a_predictor_has_none() -> None:
    assert bundled_predictor("facebook/opt-125m") is None


@pytest.mark.parametrize("chat", [False, True])
def test_it_tells_short_answers_from_long_ones(predictor: LengthPredictor, chat: bool) -> None:
    assert likeliest_range(predictor, "Spell river.", chat) == (0, 100)
    # 284 tokens; this and the song are the longest of their families.
    assert likeliest_range(predictor, "Count from 1 to 99.", chat) == (200, 300)
    assert likeliest_range(predictor, "Sing about 28 green bells on the wall.", chat)[0] >= 400


def test_a_long_prompt_is_cut_and_its_short_answer_still_seen(predictor: LengthPredictor) -> None:
    text = "Read this text. The secret word is boat. " + "It is quiet in the garden today. " * 100
    assert likeliest_range(predictor, f"{text}What is the secret word?", chat=False) == (0, 100)


def test_it_reaches_what_its_card_says_on_held_out_prompts(predictor: LengthPredictor) -> None:
    labels = read_labels(HELD_OUT)
    assert {label.split for label in labels} == {Split.HELD_OUT}
    at_100, at_200, at_400 = evaluate(predictor, labels, repeats=0).accuracies
    assert at_100.accuracy >= 0.90
    assert at_200.accuracy >= 0.95
    assert at_400.accuracy >= 0.98
    assert (round(at_100.majority, 3), round(at_200.majority, 3), round(at_400.majority, 3)) == (0.477, 0.718, 0.929)


def test_prompts_have_no_twins_and_keep_their_shares() -> None:
    prompts = make_prompts(400, seed=3)
    assert prompts == make_prompts(400, seed=3)
    assert prompts != make_prompts(400, seed=4)
    assert len({prompt.lower().rstrip(".:?!") for prompt in prompts}) == len(prompts)
    assert sum(prompt.lower().startswith("sing") for prompt in prompts) == 400 * SHARES["song"] // 100
    assert sum(SHARES.values()) == 100
