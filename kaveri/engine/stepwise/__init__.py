"""An engine that Kaveri drives step by step, and the model runners that have no model (fake, timed)."""
