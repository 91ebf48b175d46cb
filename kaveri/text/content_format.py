"""Formats in which chat templates receive the content of messages."""

import enum


class ContentFormat(enum.StrEnum):
    """Format of a message's content in a template; the names are vLLM's."""

    AUTO = "auto"
    """OPENAI if the template iterates over parts, else STRING."""
    STRING = "string"
    """One text; parts are joined by line breaks."""
    OPENAI = "openai"
    """A list of text parts."""
