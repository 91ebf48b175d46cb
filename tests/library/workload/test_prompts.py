import json
from pathlib import Path

import pytest

from kaveri.errors import ConfigError
from kaveri.workload.prompts import RequestPrompt, read_prompts

MESSAGES = [{"role": "user", "content": "hello"}]


def test_a_text_file_has_a_prompt_per_line_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("hello\r\n\n  \n Grüße\x85{}\n".encode())
    # Outer spaces and \x85, a line end in Unicode only, belong to a prompt.
    assert read_prompts(path) == [(1, RequestPrompt("prompt", "hello")), (4, RequestPrompt("prompt", " Grüße\x85{}"))]


def test_a_jsonl_file_has_all_three_kinds_and_ignores_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "hello", "id": 7}, {"messages": [MESSAGES[0] | {"name": "me"}]}, {"prompt_token_ids": [0, 5]}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    assert [prompt.as_json() for _, prompt in read_prompts(path)] == [
        {"prompt": "hello"},
        {"messages": MESSAGES},
        {"prompt_token_ids": [0, 5]},
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is no JSON"),
        pytest.param('{"prompt": ' + "[" * 100_000, "is no JSON", id="nested"),
        ('["hello"]', "is no JSON object"),
        ("{}", "has none of prompt, messages, prompt_token_ids"),
        ('{"prompt": "a", "messages": []}', "has prompt and messages of"),
        ('{"prompt": ""}', "prompt is ''; it must be a text that is not empty"),
        ('{"prompt": 7}', "prompt is 7"),
        ('{"messages": []}', "messages is []"),
        ('{"messages": [{"role": "user"}]}', "it must be a list of {"),
        ('{"prompt_token_ids": [1, -1]}', "it must be a list of numbers of at least 0"),
        ('{"prompt_token_ids": [true]}', "prompt_token_ids is [True]"),
        (b"\xff".decode("latin-1"), "is no UTF-8 from byte 0"),
    ],
)
def test_a_malformed_line_is_named_with_its_number_and_reason(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + line.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        read_prompts(path)
    assert f"{path}, line 3: " in caught.value.reason
    assert reason in caught.value.reason
    assert caught.value.field == "--prompts"


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n")
    with pytest.raises(ConfigError, match="has no prompts"):
        read_prompts(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_prompts(tmp_path / "missing.txt")
