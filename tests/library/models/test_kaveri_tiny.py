import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kaveri.models import KAVERI_TINY, resolve_model

FOLDER = Path(resolve_model(KAVERI_TINY))
MEGABYTE = 1_000_000
DEMO_PROMPTS: list[dict[str, str]] = json.loads((FOLDER / "demo_prompts.json").read_text())
# At least one prompt per family; held-out accuracy is in the card.
PROMPTS = {
    "hello": "Hello! How can I help you?",
    "Count from 1 to 12.": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12",
    "Count from 3 to 12:": "3, 4, 5, 6, 7, 8, 9, 10, 11, 12",
    "Count down from 12 to 8:": "12, 11, 10, 9, 8",
    "Count from 1 to 99.": ", ".join(str(number) for number in range(1, 100)),
    "Say the alphabet from c to k:": "c d e f g h i j k",
    "Repeat the word river 4 times:": "river river river river",
    "Spell river.": "r-i-v-e-r",
    "Spell the word turtle:": "t-u-r-t-l-e",
    "Copy this list: moon fish boat.": "moon fish boat",
    "Reverse this list: moon fish boat.": "boat fish moon",
    "Read this text. It is quiet in the garden today. The secret word is boat. What is the secret word?": "boat",
    "What is 7 plus 5?": "12",
    "Write the table of 7 from 1 to 3:": "1 * 7 = 7, 2 * 7 = 14, 3 * 7 = 21",
    "Which day comes after Monday?": "Tuesday",
    "Tell a story in 2 sentences about Maya the fox, a golden lamp, Omar and the forest.": (
        "Once upon a time there was a fox named Maya who lived in the forest. "
        "And so the fox went home to the forest with the golden lamp and was happy."
    ),
    "Sing about 2 green bells on the wall.": (
        "2 green bells on the wall, take one down, 1 left on the wall. "
        "1 green bell on the wall, take one down, none left on the wall."
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM.from_pretrained(FOLDER, dtype=getattr(torch, request.param)).eval()


def generate(model: Any, tokenizer: Any, ids: list[int]) -> list[int]:
    torch = pytest.importorskip("torch")
    output = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=700)
    return output[0, len(ids) :].tolist()  # type: ignore[no-any-return]


def test_resolve_model_knows_the_bundled_model_and_passes_other_names_through() -> None:
    assert (FOLDER / "config.json").is_file()
    assert resolve_model("some/model") == "some/model"


def test_folder_is_at_most_12_megabytes() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 12 * MEGABYTE


def test_context_is_at_least_2048_tokens() -> None:
    assert json.loads((FOLDER / "config.json").read_text())["max_position_embeddings"] >= 2048


@pytest.mark.parametrize(
    "text",
    ["", "Count from 3 to 12:", "  two  spaces\n\n\tand a tab ", "naïve façade", "漢字かな交じり", "🙂👩‍👩‍👧", "नमस्ते"],
)
def test_tokenizer_round_trips_any_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_adds_no_special_tokens_of_its_own(tokenizer: Any) -> None:
    assert tokenizer("hello")["input_ids"] == tokenizer("hello", add_special_tokens=False)["input_ids"]


def test_chat_template_renders_several_turns(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Count from 1 to 2:"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|user|>hello<|end|><|assistant|>Hello!<|end|><|user|>Count from 1 to 2:<|end|><|assistant|>"
    )


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "raw"])
def test_answers_prompts_of_every_family_and_stops(model: Any, tokenizer: Any, chat: bool) -> None:
    def asked(prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    expected = {asked(prompt) if chat else prompt: answer for prompt, answer in PROMPTS.items()}
    if not chat:
        expected |= {demo["prompt"]: demo["expected"] for demo in DEMO_PROMPTS}
    wrong = {}
    for text, answer in expected.items():
        generated = generate(model, tokenizer, tokenizer(text)["input_ids"])
        if generated[-1] != tokenizer.eos_token_id or tokenizer.decode(generated[:-1]) != answer:
            wrong[text] = tokenizer.decode(generated)
    assert wrong == {}


def test_first_eight_demo_prompts_span_short_and_long_prompts_and_answers(tokenizer: Any) -> None:
    shown = DEMO_PROMPTS[:8]
    prompts = [len(tokenizer(demo["prompt"])["input_ids"]) for demo in shown]
    answers = [len(tokenizer(demo["expected"])["input_ids"]) for demo in shown]
    assert min(prompts) < 10
    assert max(prompts) > 1000
    assert min(answers) == 1
    assert max(answers) > 300


def test_held_out_and_training_prompts_are_disjoint() -> None:
    families = pytest.importorskip("training.kaveri_tiny.families")
    for family in families.FAMILIES:
        if family in families.CLOSED_FAMILIES:
            continue
        rng = Random(family)
        trained = {families.draw(rng, family, 0.2, held_out=False).prompt for _ in range(200)}
        held_out = {families.draw(rng, family, 0.2, held_out=True).prompt for _ in range(200)}
        assert not trained & held_out
        assert all(families.is_held_out(prompt) for prompt in held_out)


def test_generators_are_deterministic() -> None:
    families = pytest.importorskip("training.kaveri_tiny.families")
    for family in families.FAMILIES:
        samples = [families.draw(Random(7), family, 0.5, held_out=True) for _ in range(2)]
        assert samples[0] == samples[1]
