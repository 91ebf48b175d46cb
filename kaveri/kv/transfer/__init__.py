"""One push of KV blocks: ticket, sender, receiver, credit."""
