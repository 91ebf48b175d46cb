"""kaveri key new, kaveri key revoke: make and revoke API keys."""

from typing import Annotated

import typer

from kaveri.cli import options
from kaveri.cli.options import option
from kaveri.config.commands import command_group

_KeysFile = Annotated[str, option("File of the keys' hashes; a new key makes it.", envvar="KAVERI_KEYS_FILE")]
key_app = command_group("Make and revoke API keys of gateways and of routers' public ports.")


@key_app.command()
def new(
    name: Annotated[str, typer.Argument(help="Who gets it: up to 64 letters, digits, '_' and '-'. Logs show it.")],
    keys_file: _KeysFile,
    requests_per_s: options.KeyLimit = 0,
    tokens_per_min: options.KeyLimit = 0,
    in_flight: options.KeyLimit = 0,
    admin: Annotated[bool, option("It may also drain instances, and see the cluster.", "--admin")] = False,
) -> None:
    """Print a new API key, once, and add its SHA-256 and its limits to the keys file.

    Limits: --requests-per-s, --tokens-per-min (of prompts and answers together) and --in-flight (requests that are
    being answered). Gateways and routers read the file again within two seconds. The file is replaced at once.
    """
    from kaveri.security.api_keys import KeyLimits, check_limit, check_name
    from kaveri.security.keys_file import add_key

    limits = KeyLimits(
        requests_per_s=check_limit(requests_per_s, "--requests-per-s"),
        tokens_per_min=check_limit(tokens_per_min, "--tokens-per-min"),
        in_flight=check_limit(in_flight, "--in-flight"),
    )
    print(add_key(keys_file, check_name(name, "NAME"), limits, admin))


@key_app.command()
def revoke(name: Annotated[str, typer.Argument(help="Whose key is good no more.")], keys_file: _KeysFile) -> None:
    """Revoke an API key, also the last one: its table in the keys file gets `revoked = true`.

    Gateways and routers read the file again within two seconds. Requests that are being answered go on.
    """
    from kaveri.security.api_keys import check_name
    from kaveri.security.keys_file import revoke_key

    revoke_key(keys_file, check_name(name, "NAME"))
