"""How chat templates get the content of messages."""

import enum


class ContentFormat(enum.StrEnum):
    """How a template gets the content of a message; the names are vLLM's."""

    AUTO = "auto"
    """As parts if the template goes over parts, else as a text."""
    STRING = "string"
    """As a text; parts are joined by line breaks."""
    OPENAI = "openai"
    """As a list of text parts."""
