"""Writes a copy of the bundled model with the tokens <think> and </think>, with which its prompts may end."""

import json
import shutil
from pathlib import Path

from kaveri.models import resolve_model

THINK_ID, THINK_END_ID = 1534, 1535
_PROMPT = "{% if enable_thinking %}{{ '<think>' }}{% else %}{{ '<think></think>' }}{% endif %}"


def write_thinking_model(folder: Path) -> str:
    """Write the model; return its path. Reasoning begins with the template's argument enable_thinking."""
    shutil.copytree(resolve_model("kaveri-tiny"), folder, dirs_exist_ok=True)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    # In place of the last two words.
    for text, token_id in (("</think>", THINK_END_ID), ("<think>", THINK_ID)):
        del vocabulary["".join(merges.pop())]
        vocabulary[text] = token_id
        added = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": token_id, "content": text, **added})
    file.write_text(json.dumps(tokenizer))
    template = folder / "chat_template.jinja"
    before, marker, rest = template.read_text().partition("{{ '<|assistant|>' }}")
    template.write_text(f"{before}{marker}{_PROMPT}{rest}")
    return str(folder)
