"""Draws that have raised, passed from the logits processor to the engine of one process. Needs no vLLM."""

RAISED_DRAWS: dict[str, str] = {}
"""Error of each draw that has raised, by engine id; the engine removes it after the step. vLLM itself cannot end one
request of a step from within a logits processor."""
