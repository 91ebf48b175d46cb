"""The prefill service: computes prompts and pushes their KV cache."""
