"""The settings of an engine: each declared once, read by the service's flags and by what builds the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kaveri.addresses import host_text
from kaveri.config.settings import MAX_PORT, hidden, present, setting, size_bytes
from kaveri.engine.copier import ReplicaOptions
from kaveri.engine.limits import SHORTEST_MODEL_LEN
from kaveri.engine.stepwise.fake import KV_UNIT_BYTES, FakeModel
from kaveri.engine.vllm.options import parse_engine_args
from kaveri.errors import ConfigError
from kaveri.kv.transfer.digest import Digests
from kaveri.kv.transfer.receiver import CREDIT_BYTES, ReceiverOptions
from kaveri.kv.transports import TLS, TRANSPORT_NAMES, transport_names
from kaveri.kv.transports.link_speed import link_text
from kaveri.latency.profile import Profile, read_profile
from kaveri.models import KAVERI_TINY
from kaveri.plugins.registry import PluginPoint
from kaveri.security.settings import tls_files
from kaveri.security.tls_files import TlsFiles

_BUILDERS = "kaveri.engine.factory"
ENGINES = PluginPoint(
    kind="engine",
    group="kaveri.engines",
    own={
        "transformers": f"{_BUILDERS}:transformers_runner",
        "vllm": f"{_BUILDERS}:vllm_engine",
        "fake": f"{_BUILDERS}:fake_runner",
        "timed": f"{_BUILDERS}:timed_runner",
    },
    needs={"transformers": "torch", "vllm": "vllm"},
)
"""Builders of engines by name. Each takes EngineSettings and returns a ModelRunner or a complete engine."""
DEFAULT_CHUNK_TOKENS = 512
"""Measured by TetriInfer (arXiv 2401.11181, section 3.3.3) for OPT-13B on its accelerator; a guess elsewhere."""
DEFAULT_BLOCK_TOKENS = 16
OF_TRANSFERS = (
    "kv_host",
    "kv_port",
    "kv_credit_bytes",
    "kv_digests",
    "kv_link",
    "kv_transports",
    "kv_tls_cert",
    "kv_tls_key",
    "kv_tls_ca",
    "replication_rate",
)
"""Names of settings that a program without KV transfers does not accept."""


def model_len(text: str) -> int:
    """Parse max_model_len: 0, or a number of tokens that leaves room for prompt and answer. Raises ValueError."""
    try:
        length = int(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no whole number") from error
    if length != 0 and length < SHORTEST_MODEL_LEN:
        raise ValueError(
            f"is {length}; it must be 0 or at least {SHORTEST_MODEL_LEN}: one token of prompt, one of answer"
        )
    return length


def _profile_at(path: str) -> Profile | None:
    try:
        return read_profile(path) if path else None
    except ConfigError as error:
        raise ValueError(error.reason) from error


def _kv_token_bytes(text: str) -> int:
    count = size_bytes(text)
    if count % KV_UNIT_BYTES:
        raise ValueError(f"is {text}; it must be a multiple of {KV_UNIT_BYTES} bytes")
    return count


@dataclass(frozen=True, kw_only=True)
class MadeUpSettings:
    """Settings of the engines without a model: "fake" makes up tokens, "timed" also takes a real model's time."""

    HELP_TITLE: ClassVar = "Engines without a model"

    latency_model: str = setting(
        "timed engine: whose time it takes, a bundled name, a JSON file or a file of `kaveri profile`", ""
    )
    time_scale: float = setting(
        "timed engine: every step takes so many times as long, where this machine would slow its services down",
        1.0,
        above=0,
    )
    fake_step_s: float = setting("fake engine: seconds that a step takes", 0.0, least=0)
    fake_prefill_token_s: float = setting("fake engine: seconds that a prompt token adds to its step", 0.0, least=0)
    fake_eos_probability: float = setting("fake engine: chance of each token to end its answer", 0.0, least=0, most=1)
    fake_verify_kv: bool = setting("fake engine: check all earlier KV in every step", True)
    fake_kv_token_bytes: int = setting(
        f"fake and timed engine: KV of a token, 64KiB or another multiple of {KV_UNIT_BYTES} bytes; 0: 256 bytes",
        0,
        _kv_token_bytes,
    )
    fake_shape: FakeModel = FakeModel()  # noqa: RUF009 - it is frozen
    """Layers, heads and positions of the made-up model; no flag sets it."""

    @property
    def fake_model(self) -> FakeModel:
        """FakeModel (made-up tokens and KV) that these settings describe."""
        shape = self.fake_shape.of_kv(self.fake_kv_token_bytes) if self.fake_kv_token_bytes else self.fake_shape
        return replace(
            shape,
            eos_probability=self.fake_eos_probability,
            step_s=self.fake_step_s,
            prefill_token_s=self.fake_prefill_token_s,
            verify=self.fake_verify_kv,
        )


@dataclass(frozen=True, kw_only=True)
class EngineSettings(MadeUpSettings):
    """Engine, model, memory and KV transport of an instance. build_engine() checks the settings together."""

    HELP_TITLE: ClassVar = "Engine and KV"

    model: str = setting("model to serve: a path, a hub id or a bundled name", KAVERI_TINY, present)
    engine: str = setting(
        "what computes: transformers, vllm, fake (made-up tokens), timed (--latency-model) or a plug-in",
        "transformers",
        ENGINES.known,
    )
    engine_args: Mapping[str, Any] | None = setting(
        "vllm engine and plug-ins: their own options, a JSON object or a YAML or JSON file; None: their defaults",
        None,
        parse_engine_args,
        mask=hidden,
    )
    dtype: str = setting(
        "element type: auto (the checkpoint's, or float32 on a CPU without instructions for it), float32, bfloat16 or "
        "float16",
        "auto",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = setting("where the model computes: auto, cpu, cuda or cuda:N", "auto")
    max_model_len: int = setting(
        f"most tokens of prompt and answer together, at least {SHORTEST_MODEL_LEN}; 0: what model and KV pool allow",
        0,
        model_len,
    )
    kv_cache_memory: int = setting(
        "size of the KV pool, all of it resident from the start: 512MiB, 2GB or a number of bytes",
        128 * 2**20,
        size_bytes,
    )
    block_tokens: int | None = setting(
        f"tokens per KV block, alike on all vllm instances; None: {DEFAULT_BLOCK_TOKENS}, with vllm on CPUs 32",
        None,
        least=1,
    )
    max_batch: int = setting("most requests in one decode step", 64, least=1)
    chunk_tokens: int = setting(
        f"most prompt tokens computed in one step; 0: the profile's, {DEFAULT_CHUNK_TOKENS} without one", 0, least=0
    )
    """Resolved on construction: never 0 afterwards."""
    profile: Profile | None = setting(  # noqa: RUF009
        "file of `kaveri profile`, measured on this model, dtype, device and engine", None, _profile_at
    )
    kv_transports: tuple[str, ...] = setting(
        "how KV is pushed (the preferred first; one that cannot connect is passed over) or taken: some of shm and unix "
        "(same machine and user only), tcp and tls, and, where they are installed, nixl, gloo and nccl, or plug-ins",
        TRANSPORT_NAMES,
        transport_names,
    )
    kv_tls_cert: str = setting(
        "transport tls: instead of --tls-cert; then every certificate of --kv-tls-ca is good", ""
    )
    kv_tls_key: str = setting("transport tls: its key, instead of --tls-key", "")
    kv_tls_ca: str = setting("transport tls: the authority, instead of --tls-ca", "")
    kv_host: str = setting("address on which pushed KV is taken; empty: the value of --host", "", host_text)
    kv_port: int = setting("port on which pushed KV is taken; 0: a free one", 0, least=0, most=MAX_PORT)
    kv_credit_bytes: int = setting(
        "KV that all prefill instances together may have under way to this one: 128MiB or a number of bytes",
        CREDIT_BYTES,
        size_bytes,
    )
    kv_digests: Digests = setting(  # noqa: RUF009
        "verify pushed KV by a digest of its bytes: auto (tcp, tls, unix and gloo; not shm, nixl and nccl), on or off",
        Digests.AUTO,
    )
    replication_rate: int = setting(
        "with replication: most KV that is copied to other instances in a second, 500MiB or a number of bytes; "
        "0: no limit",
        0,
        size_bytes,
    )
    kv_link: str = setting(
        "emulated link to push over, for studies: 25Gbps,50us or 200Gbps,800KiB/token; empty: none", "", link_text
    )

    def __post_init__(self) -> None:
        if self.chunk_tokens == 0:
            profiled = self.profile.chunk_tokens if self.profile is not None else DEFAULT_CHUNK_TOKENS
            object.__setattr__(self, "chunk_tokens", profiled)

    @property
    def kv_listen_host(self) -> str:
        """Address on which to listen for pushed KV. "::" means all interfaces."""
        return self.kv_host or "127.0.0.1"

    @property
    def kv_advertise_host(self) -> str | None:
        """Host under which other instances reach this one's KV listener; None means kv_listen_host."""
        return None

    @property
    def receiving(self) -> ReceiverOptions:
        """Options for receiving pushed KV."""
        return ReceiverOptions(self.kv_credit_bytes, self.kv_digests)

    @property
    def replicas(self) -> ReplicaOptions:
        """Options for copying requests' KV to replicas in other instances."""
        return ReplicaOptions(bytes_per_s=self.replication_rate)

    @property
    def kv_tls(self) -> TlsFiles | None:
        """TLS files for KV; None if none are given. Raises ConfigError if one is missing or kv_transports lacks tls."""
        files = tls_files(self.kv_tls_cert, self.kv_tls_key, self.kv_tls_ca, "", "kv_tls_")
        if files is not None and TLS not in self.kv_transports:
            transports = ",".join(self.kv_transports)
            raise ConfigError("kv_tls_cert", f"would change nothing: tls is not in kv_transports, {transports}")
        return files
