"""Length predictors: a small classifier that says how long a served model's answer to a prompt will be.

bundle.py serves one; label, train and evaluate make one (TetriInfer, arXiv 2401.11181, section 3.3.2 and figure 8).
"""
