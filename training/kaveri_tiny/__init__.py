"""Makes the bundled model `kaveri-tiny`: synthetic instructions, tokenizer, training and evaluation."""
