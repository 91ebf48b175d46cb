"""Speed of an emulated link: parsed from text, and converted to seconds. Pure."""

import re
from dataclasses import dataclass

_BIT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BYTE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_TIME_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d+)?)"
_FORM = "25Gbps, 300GBps, 25Gbps,50us or 200Gbps,800KiB/token"


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Bandwidth and latency of an emulated link."""

    bytes_per_s: float
    latency_s: float = 0.0
    token_bytes: int | None = None
    """KV bytes per token to charge, over all layers; None: those in the pool. For studying large models over pools of
    small ones."""

    def transfer_s(self, pool_bytes: int, pool_token_bytes: int) -> float:
        """Seconds that `pool_bytes` occupy the link, scaled to token_bytes if set. pool_token_bytes: KV bytes per token
        of the pool."""
        if self.token_bytes is None:
            return pool_bytes / self.bytes_per_s
        return pool_bytes / pool_token_bytes * self.token_bytes / self.bytes_per_s


def parse_link_speed(text: str) -> LinkSpeed:
    """Parse "25Gbps,50us": a bandwidth (bps: bits, Bps: bytes) and optionally a latency (ns, us, ms, s) and KV bytes
    per token ("800KiB/token"). Raises ValueError, naming the part."""
    bytes_per_s: float | None = None
    latency_s, token_bytes = 0.0, None
    for part in map(str.strip, text.split(",")):
        if match := re.fullmatch(_NUMBER + r"([KkMGT]?)bps", part):
            bytes_per_s = float(match[1]) * _BIT_UNITS[match[2].lower()] / 8
        elif match := re.fullmatch(_NUMBER + r"([KkMG]i?)?Bps", part):
            bytes_per_s = float(match[1]) * _BYTE_UNITS[(match[2] or "").lower()]
        elif match := re.fullmatch(_NUMBER + r"(ns|us|ms|s)", part):
            latency_s = float(match[1]) * _TIME_UNITS[match[2]]
        elif match := re.fullmatch(_NUMBER + r"([KkMG]i?)?B/token", part):
            token_bytes = int(float(match[1]) * _BYTE_UNITS[(match[2] or "").lower()])
        else:
            raise ValueError(f"{part!r} is no part of a link; write {_FORM}")
    if not bytes_per_s:
        raise ValueError(f"{text!r} has no bandwidth; write {_FORM}")
    return LinkSpeed(bytes_per_s, latency_s, token_bytes)


def link_text(text: str) -> str:
    """Return `text` unchanged if it is empty or a valid link speed. Raises ValueError."""
    if text:
        parse_link_speed(text)
    return text
