"""The colocated service: both phases on one engine. The only service that imports others: prefill and decode."""
