"""The predictor service: predicts how long answers will be, before they are generated."""
