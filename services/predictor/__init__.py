"""Predictor service: predicts the lengths of answers before they are generated."""
