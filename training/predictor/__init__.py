"""Makes the prompts from which the bundled length predictor of `kaveri-tiny` is made."""
