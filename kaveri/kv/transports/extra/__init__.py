"""Transports that no cluster prefers by itself: collectives (gloo, nccl) and emulated links."""
