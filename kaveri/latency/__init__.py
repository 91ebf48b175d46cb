"""How long an engine step takes: the model, its fit, bundled fits and profile files."""
