"""Moves KV cache between pools: layouts, tickets, sender, receiver and the transports under them."""
