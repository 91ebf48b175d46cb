"""Generated from protos/kaveri/v1 by scripts/generate_protos.py."""
