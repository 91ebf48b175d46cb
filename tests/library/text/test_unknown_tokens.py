"""Text with tokens beyond the model's vocabulary is refused."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kaveri.errors import ConfigError, InvalidArgument
from kaveri.models import resolve_model
from kaveri.text.conversation import Conversation
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1.inference_pb2 import Message

VOCAB_SIZE = 1000
"""The bundled tokenizer has 1,536 tokens."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelTokenizer]:
    folder = Path(shutil.copytree(resolve_model("kaveri-tiny"), tmp_path_factory.mktemp("cut") / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB_SIZE}))
    tokenizer = ModelTokenizer.load(str(folder))
    yield tokenizer
    tokenizer.close()


def texts(tokenizer: ModelTokenizer) -> tuple[str, str]:
    """Return a text of known tokens, and one with an unknown token."""
    unknown = next(token for token, token_id in tokenizer.unknown_tokens.items() if token.isascii() and token.isalpha())
    return "hi", f"{unknown} {unknown}"


async def test_text_with_a_token_beyond_the_models_vocabulary_is_refused_as_text(tokenizer: ModelTokenizer) -> None:
    known, unknown = texts(tokenizer)
    until_s = time.monotonic() + 60
    assert max(await tokenizer.encode(known, 100, until_s)) < VOCAB_SIZE
    token_ids, _ = await tokenizer.encode_chat(Conversation([Message(role="user", content=known)]), 100, until_s)
    assert max(token_ids) < VOCAB_SIZE
    for long in (1, 5000):
        with pytest.raises(InvalidArgument) as refused:
            await tokenizer.encode(unknown * long, 100_000, until_s)
        assert refused.value.field == "prompt.text"
        with pytest.raises(InvalidArgument) as refused:
            await tokenizer.encode_chat(Conversation([Message(role="user", content=unknown * long)]), 100_000, until_s)
        assert refused.value.field == "prompt.messages"
        assert str(VOCAB_SIZE) in str(refused.value)


def test_a_tokenizer_that_exceeds_the_model_is_named_once_at_load(
    tokenizer: ModelTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(tokenizer.unknown_tokens) == 536
    ModelTokenizer.load("kaveri-tiny").close()
    assert "tokenizer_exceeds_vocabulary" not in capsys.readouterr().out


def test_a_model_without_tokenizer_files_is_refused_by_what_is_missing(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(resolve_model("kaveri-tiny"), tmp_path / "model"))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        ModelTokenizer.load(str(folder))
