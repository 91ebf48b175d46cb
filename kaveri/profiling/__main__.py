"""`python -m kaveri.profiling`: the process that `kaveri profile` starts."""

import os
import sys
from collections.abc import Sequence

from kaveri.config.settings import read_settings
from kaveri.errors import ConfigError
from kaveri.profiling.config import ProfileConfig
from kaveri.profiling.run import run_profile
from kaveri.programs import setting_sections
from kaveri.rpc.process import CONFIG_ERROR_STATUS
from kaveri.telemetry.logs import configure_logs

_PROGRAM = "kaveri profile"


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        config = read_settings(ProfileConfig, _PROGRAM, arguments, os.environ, setting_sections).config
        configure_logs("profile", "profile", config.log_level)
        run_profile(config)
    except ConfigError as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return CONFIG_ERROR_STATUS
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
