"""The colocated service: both phases on one engine. The only one that puts two services together."""
