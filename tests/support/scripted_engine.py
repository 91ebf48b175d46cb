"""An engine whose answers are written down: a model that calls tools, for clients that are to run them.

    kaveri up --colocated 1 --engine tests.support.scripted_engine:scripted_runner

While the prompt offers tools, the first answer calls "weather" for Rome, the second, behind one result, for Paris, and
the third says what both are. Without tools it says hello. With a grammar the answer is what the fake engine draws.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from kaveri.engine.settings import EngineSettings
from kaveri.engine.stepwise.fake import FakeModel, FakeRunner
from kaveri.engine.stepwise.runner import Drawn, DrawnToken, LayerListener, SequenceSlice
from kaveri.models import resolve_model

HELLO = "Hello there."
SUNNY = "Sunny in Rome, rainy in Paris."


class ScriptedRunner(FakeRunner):
    """Draws the tokens of a script, chosen by the prompt. Prompt and answer on one engine."""

    def __init__(self, model: FakeModel, tokenizer: Tokenizer) -> None:
        super().__init__(model)
        self._tokenizer = tokenizer
        # By the request's first block: prompt so far, then the script.
        self._prompts: dict[int, list[int]] = {}

    def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
        found = super().run(batch, on_layer)
        for number, part in enumerate(batch):
            prompt = self._prompts.setdefault(part.block_ids[0], [])
            if part.start == 0:
                prompt.clear()
            prompt += part.token_ids
            if part.draw and part.rules is None:
                script = self._script(prompt[: len(prompt) - part.draw_index])
                token_id = script[part.draw_index] if part.draw_index < len(script) else self.model.eos_token_id
                found[number] = DrawnToken(token_id, self.model.logprobs(token_id, part.params.logprobs))
        return found

    def _script(self, prompt: Sequence[int]) -> list[int]:
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        results = len(re.findall(re.escape("<|tool|>"), text.rpartition("<|user|>")[2]))
        if '"name": "weather"' not in text:
            answer = HELLO
        elif results < len(CITIES):
            answer = f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{CITIES[results]}"}}}}\n</tool_call>'
        else:
            answer = SUNNY
        ids: list[int] = self._tokenizer.encode(answer, add_special_tokens=False).ids
        return ids


CITIES = ("Rome", "Paris")


def scripted_runner(settings: EngineSettings) -> ScriptedRunner:
    """Build the runner, for the vocabulary of the bundled model."""
    tokenizer = Tokenizer.from_file(f"{resolve_model(settings.model)}/tokenizer.json")
    model = replace(FakeModel(), vocab_size=tokenizer.get_vocab_size(), max_model_len=2048, verify=False)
    return ScriptedRunner(model, tokenizer)
