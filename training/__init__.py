"""Scripts that make the artefacts bundled with Kaveri; not part of the installed package."""
