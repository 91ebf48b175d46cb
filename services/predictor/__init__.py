"""The predictor service: says how long answers will be, before they are generated."""
