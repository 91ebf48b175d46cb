"""Memory layouts of KV blocks, and the mapping of blocks of one layout to those of another."""
