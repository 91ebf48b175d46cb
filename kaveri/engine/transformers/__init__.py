"""Runs any causal language model of Hugging Face transformers on Kaveri's own paged KV cache. No copy of model code."""
