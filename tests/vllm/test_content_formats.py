"""The router finds out how chat templates get the content of messages, and agrees with vLLM."""

import pytest
from vllm.renderers.hf import _detect_content_format

from kaveri.text.chat_template import ChatTemplate
from tests.support.chat_templates import SHAPES, stored_templates
from tests.support.tiny_tokenizers import FAMILIES

TEMPLATES = {
    **{name: shape for name, shape in SHAPES.items() if name != "parts, joined without a loop"},
    **{path.name: path.read_text() for path in stored_templates() if "chat_templates" in path.parts},
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_of_a_template_is_the_one_that_vllm_finds(name: str) -> None:
    """Except templates that index parts without a loop: vLLM gives those a text, which they lose."""
    tokenizer = FAMILIES["llama3"]()
    tokenizer.chat_template = TEMPLATES[name]
    assert ChatTemplate(tokenizer).content_format == _detect_content_format(TEMPLATES[name], default="string")
