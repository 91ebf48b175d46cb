"""Command-line flags shared by several commands."""

import functools
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kaveri.config.settings import MAX_PORT
from kaveri.config.sources import flag_of
from kaveri.errors import ConfigError


def option(help: str, *flags: str, **settings: Any) -> Any:
    """Declare a command-line option. flags: its spelling, if not the parameter's name. settings: for typer.Option."""
    return typer.Option(*flags, help=help, **settings)


def port_option(help: str) -> Any:
    return option(help, min=0, max=MAX_PORT)


Target = Annotated[str, option("Router to ask, HOST:PORT; several with commas between them.", envvar="KAVERI_TARGET")]
Model = Annotated[str | None, option("Model to ask. Unset: the only one that is served.")]
MaxTokens = Annotated[int | None, option("Most tokens to generate. Unset: the model's, or all that fit.")]
MinTokens = Annotated[int, option("Fewest tokens: the answer does not end before it has so many.")]
Temperature = Annotated[float, option("Divides the logits. 0: the same answer every time.")]
TopP = Annotated[
    float | None,
    option("Draw from the smallest set of tokens that reaches this probability. Unset: the model's, or 1."),
]
TopK = Annotated[int | None, option("Draw from this many most likely tokens. 0: all. Unset: the model's, or 0.")]
Seed = Annotated[int | None, option("Makes draws repeatable. Unset: random.")]
Stop = Annotated[list[str] | None, option("Text that ends the answer. May be given several times.")]
KeyLimit = Annotated[int, option("Limit of this key. 0: none.")]
SloTtftS = Annotated[float | None, option("Seconds to the first token that count as met.")]
SloTpotS = Annotated[float | None, option("Seconds per further token that count as met.")]
Trace = Annotated[Path | None, option("Lengths and times from a trace: Azure 2023 CSV or Mooncake JSON lines.")]
Rate = Annotated[float | None, option("Open loop: requests per second. With --trace: replaces its times.")]
Concurrency = Annotated[int | None, option("Closed loop: so many requests at once, without a schedule.", min=1)]
Overheads = Annotated[Path | None, option("TOML file of what the services take: hop_s, prefill_step_s and others.")]
PolicySeed = Annotated[int, option("Of lengths, arrivals and policies.", min=0, max=2**32 - 1)]
TimeoutS = Annotated[float, option("Seconds until the request is given up.")]


def check_positive(**given: float | None) -> None:
    """Raise ConfigError for the first flag that is set (not None) and is not a finite number above 0."""
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(flag_of(name), f"is {value:g}; it must be more than 0")


def refuse_given(reason: str, **given: object) -> None:
    """Raise ConfigError, with this reason, for the first flag that is set (not None)."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(flag_of(name), reason)


def targets_of(text: str) -> tuple[str, ...]:
    """Split the text of --target at commas into router addresses. Does not validate them."""
    return tuple(part.strip() for part in text.split(","))


_TLS = {
    "tls_cert": "PEM file of the certificate to show to services that speak TLS. Unset: none is shown.",
    "tls_key": "PEM file of its key, unencrypted.",
    "tls_ca": "PEM file of the authority that the services' certificates are of.",
    "tls_name": "DNS name in the services' certificates. Unset: kaveri, or the host's where no certificate is shown.",
}


def speaks_tls(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: add --tls-cert, --tls-key, --tls-ca and --tls-name, for all its connections."""

    @functools.wraps(command)
    def run(*args: Any, **given: Any) -> None:
        words = {name: given.pop(name) for name in _TLS}
        if any(words.values()):
            from kaveri.rpc.tls import RpcTls, use_tls
            from kaveri.security.settings import DEFAULT_NAME, tls_files
            from kaveri.security.tls_files import TlsFiles

            certificate, key, authority, name = (words[each] for each in _TLS)
            # A router's public port asks for no certificate, and its own carries its hostname.
            public = TlsFiles(authority=authority, name=name)
            files = tls_files(certificate, key, authority, name or DEFAULT_NAME) if certificate or key else public
            use_tls(None if files is None else RpcTls(files))
        command(*args, **given)

    signature = inspect.signature(command)
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default="",
            annotation=Annotated[str, option(text, envvar=f"KAVERI_{name.upper()}")],
        )
        for name, text in _TLS.items()
    ]
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, **{each.name: each.annotation for each in added}}
    return run
