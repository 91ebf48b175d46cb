"""Load for a cluster: which requests come when, sending them, and what became of them."""
