"""Transports that must be configured explicitly: collectives (gloo, nccl) and emulated links."""
