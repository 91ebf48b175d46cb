"""Runs a model on vLLM: our loop around its in-process engine, our push connector on its hooks. Needs vLLM (0.32)."""
