"""Duration of engine steps: latency model, its fit, bundled fits, and profile files."""
