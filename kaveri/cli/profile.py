"""kaveri profile: replaced by the measuring process, which parses all flags but --quick. Needs no torch."""

import os
import sys
from typing import Annotated, NoReturn

import typer


def profile(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps, each measured less often.")] = False,
) -> NoReturn:
    """Measure steps of an engine on this machine, for --profile; `kaveri profile --help` lists its flags."""
    flags = [*context.args, *(("--quick", "true") if quick else ())]
    # -P: ignore a folder named "kaveri" in the working directory.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "kaveri.profiling", *flags])
