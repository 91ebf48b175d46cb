"""An engine that Kaveri drives step by step, and the runners that have no model."""
