"""kaveri profile: replaced by the measuring process, which parses all flags but --quick. Needs no torch."""

import os
import sys
from typing import Annotated, NoReturn

import typer

from kaveri.cli.options import option


def profile(
    context: typer.Context, quick: Annotated[bool, option("Fewer steps, each measured less often.", "--quick")] = False
) -> NoReturn:
    """Measure steps of an engine on this machine, for --profile; `kaveri profile --help` lists its flags."""
    flags = [*context.args, *(("--quick", "true") if quick else ())]
    # -P: ignore a folder named "kaveri" in the working directory.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "kaveri.profiling", *flags])
