"""Settings of ports that strangers may reach."""

from dataclasses import dataclass

from kaveri.config.settings import setting


@dataclass(frozen=True, kw_only=True)
class KeySettings:
    """Settings of a service that asks for API keys."""

    keys_file: str = setting(
        "file of API keys, made by `kaveri key new`, read again when it changes; empty: no key is asked for", ""
    )
