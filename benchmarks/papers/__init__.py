"""Experiments of TetriInfer and DéjàVu, repeated on Kaveri."""
