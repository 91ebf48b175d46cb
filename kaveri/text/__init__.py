"""Text to token ids and back: tokenizer, chat template, incremental detokenizer. Does not import torch."""
