"""Duration of engine steps: the model, its fit, bundled fits and profile files."""
