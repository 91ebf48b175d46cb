"""How reports on tokens look in OpenAI's form."""

import json

from kaveri.client.answer import Chunk
from kaveri.domain.sampling import Logprobs
from services.gateway.asked import read_completion
from services.gateway.formats import CompletionFormat
from services.gateway.shown_prompts import ShownPrompt


def test_of_tokens_with_the_same_text_the_likeliest_counts() -> None:
    piece = "\ufffd"
    entry = Logprobs(-3.0, ((7, -0.5), (8, -1.0), (9, -3.0)), text=piece, top_texts=(piece, "a", piece))
    asked = read_completion({"prompt": [300], "logprobs": 3, "max_tokens": 1, "stream": True}, 1)
    chunk = Chunk(index=0, token_ids=(9,), text=piece, logprobs=(entry,), finish_reason=None, usage=None, timing=None)
    (event,) = CompletionFormat(asked, [ShownPrompt()], "x", "m", 0).events(0, chunk, 1)
    report = json.loads(event.removeprefix(b"data: "))["choices"][0]["logprobs"]
    assert report["top_logprobs"] == [{piece: -0.5, "a": -1.0}]
    assert report["token_logprobs"] == [-3.0]
