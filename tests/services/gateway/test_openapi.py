from collections.abc import Callable, Mapping
from typing import Any

import pytest

from services.gateway import parsed_request as asking
from services.gateway.fields import Fields
from services.gateway.openapi import CHAT, COMPLETION, IGNORED_OF_CHAT, openapi_document
from services.gateway.parsed_request import read_chat, read_completion
from tests.services.gateway.conftest import GatewayUnderTest

COMPLETION_BODY = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
CHAT_BODY = {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("read", "body", "schema"), [(read_completion, COMPLETION_BODY, COMPLETION), (read_chat, CHAT_BODY, CHAT)]
)
def test_the_document_names_each_field_that_is_read(
    monkeypatch: pytest.MonkeyPatch, read: Callable[..., Any], body: Mapping[str, Any], schema: dict[str, Any]
) -> None:
    taken: dict[str, set[str]] = {}

    class RecordedFields(Fields):
        def take(self, name: str) -> Any:
            taken.setdefault(self._path.rstrip("."), set()).add(name)
            return super().take(name)

    monkeypatch.setattr(asking, "Fields", RecordedFields)
    read(body, 8)
    assert taken.pop("") == set(schema["properties"]) - set(IGNORED_OF_CHAT)
    (options, _) = schema["properties"]["stream_options"]["anyOf"]
    assert taken.pop("stream_options") == set(options["properties"])
    for path, names in taken.items():
        assert path == "messages[0]"
        assert names == set(schema["properties"]["messages"]["items"]["properties"])


@pytest.mark.parametrize(
    ("read", "body", "schema"),
    [(read_completion, {"prompt": "x"}, COMPLETION), (read_chat, {"messages": CHAT_BODY["messages"]}, CHAT)],
)
def test_what_the_document_calls_ignored_is_taken(
    read: Callable[..., Any], body: Mapping[str, Any], schema: dict[str, Any]
) -> None:
    samples = {"object": {}, "string": "x", "boolean": True, "array": []}
    for name in set(IGNORED_OF_CHAT) & set(schema["properties"]):
        (found, _) = schema["properties"][name]["anyOf"]
        values = found.get("enum") or [found["const"] if "const" in found else samples[found["type"]]]
        for value in values:
            given = {"type": "text"} if name == "response_format" else value
            assert read({**body, name: given}, 8) == read(body, 8)


async def test_the_document_is_served_and_names_paths_that_are(gateway: GatewayUnderTest) -> None:
    document = (await gateway.ask("/openapi.json")).json
    assert document == openapi_document(document["info"]["version"])
    for path, methods in document["paths"].items():
        body = None if "get" in methods else {}
        answer = await gateway.ask(path.replace("{model}", "kaveri-tiny"), body)
        assert answer.status == (400 if "post" in methods else 200), path
