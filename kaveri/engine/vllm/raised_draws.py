"""Draws that have raised, between the logits processor and the engine of one process. Needs no vLLM."""

RAISED_DRAWS: dict[str, str] = {}
"""What each has raised, by engine id; the engine takes it out behind the step. vLLM itself has no way to end one
request of a step from within a logits processor."""
