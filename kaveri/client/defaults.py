"""Defaults of a client, without gRPC: the command line shows them in its help."""

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0
"""Default deadline: longer than any answer that a person waits for, but finite, so no request stays forever."""
