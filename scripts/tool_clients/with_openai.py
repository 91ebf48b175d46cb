"""openai-python against a scripted model: python with_openai.py URL."""

import json
import sys

import openai
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
USER = {"role": "user", "content": "How is the weather?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=130)


def say(what: str, ok: bool, shown: object) -> None:
    print(f"{'ok' if ok else 'WRONG'}\t{what}\t{'' if ok else shown}")


answer = client.chat.completions.create(model="kaveri-tiny", messages=[USER])
say("text", answer.choices[0].message.content == "Hello there.", answer)
parsed = client.chat.completions.parse(model="kaveri-tiny", messages=[USER], response_format=Person)
say("schema", isinstance(parsed.choices[0].message.parsed, Person), parsed)
for stream in (False, True):
    messages: list = [USER]
    for _ in range(3):
        if stream:
            with client.chat.completions.stream(model="kaveri-tiny", messages=messages, tools=TOOLS) as events:
                for _event in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = (
                client.chat.completions.create(model="kaveri-tiny", messages=messages, tools=TOOLS).choices[0].message
            )
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{city}: sunny"})
    say(
        f"tools, 3 turns{', streamed' if stream else ''}", message.content == "Sunny in Rome, rainy in Paris.", messages
    )
