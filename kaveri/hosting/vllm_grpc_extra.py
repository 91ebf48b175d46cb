"""Checks for the package required by --vllm-grpc."""

from google.protobuf.runtime_version import VersionError

from kaveri.errors import ConfigError
from kaveri.extras import install_command, lacks


def require_vllm_grpc() -> None:
    """Raise ConfigError if the package for --vllm-grpc is missing, or incompatible with gRPC or protobuf here."""
    try:
        # Import here: without the flag the package is not needed.
        from smg_grpc_proto import vllm_engine_pb2  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("--vllm-grpc", lacks(str(error.name), "vllm-grpc")) from error
    except VersionError as error:
        raise ConfigError("--vllm-grpc", f"{error}: {install_command('vllm-grpc')}") from error
