"""A user's own prompts, read from a file."""

from pathlib import Path

import pytest

from kaveri.errors import ConfigError
from kaveri.loadgen.prompts import read_prompts


def test_a_text_file_has_a_prompt_per_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("first\n\n  second \nthird\n")
    assert read_prompts(path, 2) == ["first", "second"]
    assert read_prompts(path, 10) == ["first", "second", "third"]


def test_a_jsonl_file_has_texts_conversations_and_token_ids(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "hello", "id": 3}\n'
        '{"messages": [{"role": "user", "content": "why", "name": "x"}]}\n'
        "\n"
        '{"prompt_token_ids": [5, 0]}\n'
    )
    assert read_prompts(path, 10) == ["hello", ({"role": "user", "content": "why"},), (5, 0)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no prompts"),
        ("nonsense\n", "line 1"),
        ('{"prompt": "a"}\n["b"]\n', "line 2: is no object"),
        ('{"text": "a"}\n', "line 1: has none of"),
        ('{"prompt": "a", "messages": []}\n', "line 1: has prompt and messages"),
        ('{"prompt": ""}\n', "line 1: prompt is empty"),
        ('{"prompt": 5}\n', "line 1: prompt is no text"),
        ('{"prompt_token_ids": "12"}\n', "line 1: prompt_token_ids is no list"),
        ('{"prompt_token_ids": [1, true]}\n', "line 1"),
        ('{"prompt_token_ids": [1, -1]}\n', "line 1"),
        ('{"messages": [{"role": "user"}]}\n', "line 1: messages has an entry"),
        ("[" * 100_000 + "\n", "line 1"),
    ],
)
def test_a_malformed_file_is_refused_with_the_line_and_the_reason(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_prompts(path, 10)
    assert complaint in str(refused.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(path, 1)
