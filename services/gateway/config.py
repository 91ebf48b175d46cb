"""Settings of the gateway; read from flags and KAVERI_* variables by kaveri.rpc.process."""

import re
from dataclasses import dataclass

from kaveri.client.targets import check_targets
from kaveri.config.settings import MAX_PORT, setting, size_bytes
from kaveri.errors import InvalidArgument
from kaveri.rpc.process import ServiceConfig
from kaveri.security.posture import AN_API_KEY, ListeningPort
from kaveri.security.settings import PublicSettings

DEFAULT_PORT = 8000
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s@?#]+")


def router_addresses(text: str) -> tuple[str, ...]:
    """Parse "host:port" addresses separated by commas; empty text: none. Raises ValueError."""
    if not text.strip():
        return ()
    try:
        return check_targets([word.strip() for word in text.split(",")])
    except InvalidArgument as error:
        raise ValueError(f"is {error.value!r:.140}; write {error.limit}") from error


def web_origins(text: str) -> tuple[str, ...]:
    """Parse origins ("https://chat.example.com") separated by commas, or "*"; empty text: none. Raises ValueError."""
    origins = tuple(word.strip() for word in text.split(",")) if text.strip() else ()
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"is {origin!r:.140}; write SCHEME://HOST[:PORT] as browsers send it, or *")
    return origins


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Limits on HTTP connections, requests and slow clients of a gateway."""

    request_timeout_s: float = setting(
        "seconds that an answer may take, from the request's arrival", 600.0, above=0, most=7 * 86_400.0
    )
    slow_reader_s: float = setting(
        "seconds that a client may take to read what was written for it; then its request is cancelled and its "
        "connection closed",
        30.0,
        above=0,
        most=3600.0,
    )
    slow_sender_s: float = setting(
        "seconds for the head of a request to arrive, and as many again for its body", 30.0, above=0, most=3600.0
    )
    idle_s: float = setting("seconds that a connection may wait for its next request", 75.0, above=0, most=86_400.0)
    max_connections: int = setting("open connections; more are refused with 503", 4096, least=1)
    max_header_bytes: int = setting(
        "size of a request's line and headers; more are refused with 431", 32 * 1024, size_bytes, least=1024
    )
    max_body_bytes: int = setting(
        "size of a request's body; more is refused with 413", 4 * 2**20, size_bytes, least=1024
    )
    max_bodies_bytes: int = setting(
        "size of the bodies of all requests in flight, of their prompts for each further answer, and of the reports on "
        "these; more are refused with 503, and past a quarter those of one API key",
        256 * 2**20,
        size_bytes,
        least=1024,
    )
    max_answers: int = setting("answers that one request may ask for: prompts times n", 256, least=1)


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(HttpLimits, PublicSettings, ServiceConfig):
    """Answers OpenAI's HTTP API: asks the routers of one cluster, and streams their answers."""

    port: int = setting("port to listen on for HTTP; 0: a free one", DEFAULT_PORT, least=0, most=MAX_PORT)
    routers: tuple[str, ...] = setting(
        "routers to ask, HOST:PORT with commas between them; then Redis is not used, and `kaveri status` does "
        "not show this gateway. Empty: those that Redis names",
        (),
        router_addresses,
    )
    direct: str = setting(
        "whether to read tokens at the decode instances that draw them, where it can reach these; auto: unless its "
        "routers want an API key",
        "auto",
        choices=("auto", "on", "off"),
    )
    cors_origin: tuple[str, ...] = setting(
        "origins whose web pages may ask this gateway (CORS), SCHEME://HOST[:PORT] with commas between them; *: every "
        "page. Empty: none",
        (),
        web_origins,
    )

    @property
    def ports(self) -> tuple[ListeningPort, ...]:
        asks_for = AN_API_KEY if self.keys_file else ""
        http = ListeningPort(
            flag="--port", host=self.host, port=self.port, is_encrypted=self.public_tls is not None, asks_for=asks_for
        )
        return (http, *super().ports[1:])
