"""pydantic-ai against a scripted model: python with_pydantic_ai.py URL."""

import sys

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("kaveri-tiny", provider=OpenAIProvider(base_url=sys.argv[1], api_key="none"))


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=130)


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"{city}: sunny"


def say(what: str, ok: bool, shown: object) -> None:
    print(f"{'ok' if ok else 'WRONG'}\t{what}\t{'' if ok else shown}")


found = Agent(model).run_sync("Hi").output
say("text", found == "Hello there.", found)
found = Agent(model, output_type=Person).run_sync("Someone").output
say("schema, by a tool", isinstance(found, Person), found)
found = Agent(model, output_type=NativeOutput(Person)).run_sync("Someone").output
say("schema, native", isinstance(found, Person), found)
found = Agent(model, tools=[weather]).run_sync("How is the weather?").output
say("tools, 3 turns", found == "Sunny in Rome, rainy in Paris.", found)
