"""The process of an engine instance: prefill and decode on one engine. The only service that imports others."""
