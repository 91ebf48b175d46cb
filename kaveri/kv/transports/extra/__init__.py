"""Transports used only on request: collectives (gloo, nccl) and emulated links."""
