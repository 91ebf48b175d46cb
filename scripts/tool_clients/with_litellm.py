"""LiteLLM's SDK against a scripted model: python with_litellm.py URL."""

import json
import sys

import litellm
from pydantic import BaseModel, Field

GIVEN = {"model": "openai/kaveri-tiny", "api_base": sys.argv[1], "api_key": "none"}
USER = {"role": "user", "content": "How is the weather?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=130)


def say(what: str, ok: bool, shown: object) -> None:
    print(f"{'ok' if ok else 'WRONG'}\t{what}\t{'' if ok else shown}")


say("text", litellm.completion(messages=[USER], **GIVEN).choices[0].message.content == "Hello there.", "")
found = litellm.completion(messages=[USER], response_format=Person, **GIVEN).choices[0].message.content
say("schema", isinstance(Person.model_validate_json(found), Person), found)
messages: list = [USER]
for _ in range(3):
    message = litellm.completion(messages=messages, tools=TOOLS, **GIVEN).choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        city = json.loads(call.function.arguments)["city"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{city}: sunny"})
say("tools, 3 turns", message.content == "Sunny in Rome, rainy in Paris.", messages)
text = "".join(
    part.choices[0].delta.content or "" for part in litellm.completion(messages=[USER], stream=True, **GIVEN)
)
say("text, streamed", text == "Hello there.", text)
