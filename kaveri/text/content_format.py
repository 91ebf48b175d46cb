"""Formats in which a chat template receives a message's content."""

import enum


class ContentFormat(enum.StrEnum):
    """Format of a message's content in a chat template; names as in vLLM."""

    AUTO = "auto"
    """OPENAI if the template iterates over parts, else STRING."""
    STRING = "string"
    """One text; parts are joined by line breaks."""
    OPENAI = "openai"
    """A list of text parts."""
