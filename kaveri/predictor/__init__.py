"""Length predictors: small classifiers that predict how long a served model's answer to a prompt will be (TetriInfer,
arXiv 2401.11181, section 3.3.2 and figure 8). bundle.py runs one; label, train and evaluate create one."""
