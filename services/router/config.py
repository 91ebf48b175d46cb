"""The router's settings, read from flags and KAVERI_* variables by kaveri.rpc.process."""

import socket
from dataclasses import dataclass

from kaveri.addresses import address_text, host_text, is_all_addresses, join_address
from kaveri.config.settings import MAX_PORT, present, setting, size_bytes
from kaveri.config.sources import flag_of
from kaveri.errors import ConfigError
from kaveri.hosting.policy_settings import PREFILL_PLACEMENTS
from kaveri.models import KAVERI_TINY
from kaveri.policy.byte_budget import KEY_SHARE
from kaveri.policy.flipping import FlipPolicy, FlipRules
from kaveri.policy.placement import AnyPrefillPlacement, PlacementPolicy
from kaveri.rpc.process import ServiceConfig
from kaveri.rpc.server import MAX_MESSAGE_BYTES
from kaveri.security.posture import AN_API_KEY, ListeningPort
from kaveri.security.settings import PublicSettings
from kaveri.text.content_format import ContentFormat


@dataclass(frozen=True, kw_only=True)
class FrontSettings(PublicSettings, ServiceConfig):
    """Settings of a router's served model, and of its ports."""

    model: str = setting(
        "model to serve: a path, a hub id or a bundled name; its tokenizer is loaded here", KAVERI_TINY, present
    )
    chat_template_content_format: ContentFormat = setting(  # noqa: RUF009 - it is a field
        "how the chat template gets the content of messages: string, openai (a list of parts), or auto: as parts if it "
        "goes over parts",
        ContentFormat.AUTO,
    )
    tool_parser: str = setting(
        "how the model writes calls of tools: auto (by its chat template), none, hermes, llama3_json, json, or a "
        "plug-in's package.module:name",
        "auto",
        present,
    )
    reasoning_parser: str = setting(
        "how the model writes its reasoning: auto (by its chat template), none, or think (between <think> and "
        "</think>)",
        "auto",
        present,
    )
    generation_config: str = setting(
        "what requests get for a temperature, min_p, max_tokens and so on that they leave unset: auto (the model's "
        "generation_config.json, as vLLM uses it), none, or the path of another such file or its folder, whose "
        "max_new_tokens also limits every answer",
        "auto",
        present,
    )
    served_model_name: str = setting("name under which the model is asked for; empty: the value of --model", "")
    public_port: int = setting(
        "port for clients with API keys of --keys-file, which show no certificate; 0: none", 0, least=0, most=MAX_PORT
    )
    public_host: str = setting("address to listen on with --public-port; empty: the value of --host", "", host_text)
    public_address: str = setting(
        "HOST:PORT under which these clients reach this router, or a load balancer of all routers; empty: this port at "
        "--public-host, or at this machine's name where that is all addresses, or without it at --advertise-host",
        "",
        address_text,
    )
    vllm_grpc: bool = setting(
        "whether the router's own port also serves vllm.grpc.engine.VllmEngine, the whole cluster as one worker; it "
        "needs the extra kaveri[vllm-grpc]",
        False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.public_port and not self.keys_file:
            raise ConfigError("--keys-file", "is not given, but --public-port, which asks clients for API keys")

    @property
    def ports(self) -> tuple[ListeningPort, ...]:
        public = ListeningPort(
            flag="--public-port",
            host=self.public_listen_host,
            port=self.public_port,
            is_encrypted=self.public_tls is not None,
            asks_for=AN_API_KEY,
        )
        return (*super().ports, public) if self.public_port else super().ports

    @property
    def public_listen_host(self) -> str:
        """Host on which the public port, for clients with API keys, listens."""
        return self.public_host or self.host

    @property
    def advertised_public_address(self) -> str:
        """HOST:PORT at which clients with API keys reach the public port; empty: there is no such port."""
        if not self.public_port:
            return ""
        host = self.public_host or self.reached_host
        host = socket.gethostname() if is_all_addresses(host) else host
        return self.public_address or join_address(host, self.public_port)

    @property
    def model_name(self) -> str:
        """Name of the served model, for callers and in the cluster."""
        return self.served_model_name or self.model


@dataclass(frozen=True, kw_only=True)
class RouterConfig(FrontSettings):
    """Takes requests from clients, places them on prefill instances, and relays the tokens of decode instances."""

    max_requests: int = setting("requests in flight at once; more are refused with RESOURCE_EXHAUSTED", 1024, least=1)
    max_bodies_bytes: int = setting(
        "size of the requests in flight, as they came; more are refused with RESOURCE_EXHAUSTED, and past a quarter "
        "those of one API key",
        256 * 2**20,
        size_bytes,
        least=KEY_SHARE * MAX_MESSAGE_BYTES,
    )
    max_reattaches_per_s: float = setting(
        "clients that may re-attach a second, after a burst of --max-requests; more are refused with "
        "RESOURCE_EXHAUSTED, and try again",
        200.0,
        above=0,
    )
    default_timeout_s: float = setting(
        "seconds for requests whose caller set no deadline", 600.0, above=0, most=7 * 86_400.0
    )
    placement_policy: AnyPrefillPlacement = setting(  # noqa: RUF009 - it is a field
        "how a prefill instance is chosen: power-of-two, least-loaded, round-robin, random or a plug-in",
        PlacementPolicy.POWER_OF_TWO,
        PREFILL_PLACEMENTS.parse,
    )
    max_attempts: int = setting(
        "placements of one request that may be lost before it fails with its last error", 8, least=1
    )
    unavailable_after_s: float = setting(
        "seconds that a request waits for an instance when there is none, or none that can be reached; longer than an "
        "engine takes to load and start again",
        120.0,
        least=0,
    )
    slow_reader_s: float = setting(
        "seconds that a client may take to read one response; then its request ends with ABORTED", 30.0, above=0
    )
    suspect_after_s: float = setting(
        "seconds without a sign of life from an instance after which its requests go on elsewhere; one that decodes "
        "sends such signs, one that computes prompts is asked for them",
        0.5,
        least=0.2,
        most=60.0,
    )
    monitor_interval_s: float = setting(
        "seconds between two broadcasts of all loads to prefill instances, by the router that leads; TetriInfer's 0.1; "
        "it renews its lead with them, so at most half of the lead's lease",
        0.1,
        above=0,
        most=0.5,
    )
    flip_policy: str = setting(
        "when the router that leads changes the phases of instances: none, idle (after a minute almost without work), "
        "slo (a target is about to be missed) or auto: slo if both targets are given",
        "auto",
        choices=("auto", *FlipPolicy),
    )
    slo_ttft_s: float = setting("target for the time to first token, for --flip-policy slo; 0: none", 0.0, least=0)
    slo_tpot_s: float = setting("target for the time per output token, for --flip-policy slo; 0: none", 0.0, least=0)
    min_prefill: int = setting("instances that keep serving prefill, whatever --flip-policy decides", 1, least=1)
    min_decode: int = setting("instances that keep serving decode, whatever --flip-policy decides", 1, least=1)
    flip_cooldown_s: float = setting(
        "seconds between two changes of phase by --flip-policy; more than an instance takes to show one", 1.0, least=0.2
    )
    flip_dry_run: bool = setting("whether the decisions of --flip-policy are logged and not carried out", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self.flip_rules  # noqa: B018 - it raises
        except ConfigError as error:
            raise ConfigError(flag_of(error.field), error.reason) from error

    @property
    def flip_rules(self) -> FlipRules:
        """Rules by which the router that leads changes phases. Raises ConfigError."""
        policy = self.flip_policy
        if policy == "auto":
            policy = FlipPolicy.SLO if self.slo_ttft_s and self.slo_tpot_s else FlipPolicy.NONE
        return FlipRules(
            policy=FlipPolicy(policy),
            ttft_s=self.slo_ttft_s,
            tpot_s=self.slo_tpot_s,
            min_prefill=self.min_prefill,
            min_decode=self.min_decode,
            cooldown_s=self.flip_cooldown_s,
        )
