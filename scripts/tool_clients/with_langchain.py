"""LangChain against a scripted model: python with_langchain.py URL."""

import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

model = ChatOpenAI(base_url=sys.argv[1], api_key="none", model="kaveri-tiny", max_retries=0)


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=130)


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"{city}: sunny"


def say(what: str, ok: bool, shown: object) -> None:
    print(f"{'ok' if ok else 'WRONG'}\t{what}\t{'' if ok else shown}")


say("text", model.invoke("Hi").content == "Hello there.", "")
for method in ("json_schema", "function_calling", "json_mode"):
    chosen = model.with_structured_output(Person, method=method) if method != "json_mode" else None
    if chosen is not None:
        found = chosen.invoke("Someone")
        say(f"schema, {method}", isinstance(found, Person), found)
agent = create_agent(model, [weather])
asked = {"messages": [{"role": "user", "content": "How is the weather?"}]}
last = agent.invoke(asked)["messages"]
say("tools, 3 turns", last[-1].content == "Sunny in Rome, rainy in Paris.", last)
chunks = "".join(
    str(part[0].content) for part in agent.stream(asked, stream_mode="messages") if part[1]["langgraph_node"] == "model"
)
say("tools, 3 turns, streamed", chunks.endswith("Sunny in Rome, rainy in Paris."), chunks)
