"""instructor against a scripted model: python with_instructor.py URL."""

import sys

import instructor
import openai
from pydantic import BaseModel, Field

USER = {"role": "user", "content": "Someone"}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=130)


def say(what: str, ok: bool, shown: object) -> None:
    print(f"{'ok' if ok else 'WRONG'}\t{what}\t{'' if ok else shown}")


for name in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
    plain = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=getattr(instructor.Mode, name))
    found = client.chat.completions.create(model="kaveri-tiny", messages=[USER], response_model=Person, max_retries=0)
    say(f"schema, {name}", isinstance(found, Person), found)
plain = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
client = instructor.from_openai(plain)
parts = list(client.chat.completions.create_partial(model="kaveri-tiny", messages=[USER], response_model=Person))
say("schema, streamed in parts", parts[-1].age is not None, parts[-1:])
