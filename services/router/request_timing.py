"""Where one request spent its time, as its router knows it."""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class RequestTiming:
    """Where a request spent its time, as inference.proto's Timing; of the last attempt where there were several."""

    attempts: int = 0
    prefill_instance_id: str = ""
    decode_instance_id: str = ""
    router_s: float = 0.0
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    kv_transfer_s: float = 0.0
    kv_tail_s: float = 0.0
    kv_bytes: int = 0
    kv_transport: str = ""
    decode_queue_s: float = 0.0
    decode_s: float = 0.0
    resumes: int = 0
    held_tokens: int = 0
    recomputed_tokens: int = 0
    stall_s: float = 0.0

    def known(self) -> dict[str, Any]:
        """By name, without what is 0 or empty."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name))}
