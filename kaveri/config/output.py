"""Handles a stdout whose reader has exited, or whose encoding lacks a character."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator

BROKEN_PIPE_STATUS = 128 + signal.SIGPIPE
"""Exit status that a shell reports for a program ended by SIGPIPE."""


@contextlib.contextmanager
def quiet_output() -> Iterator[None]:
    """Exit with status 141, silently, once the reader of stdout has exited, as with `| head -1`. Writes characters that
    stdout's encoding lacks, such as é in ASCII, as \\xe9."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            # Flush here: a broken pipe at interpreter exit would be reported on stderr.
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE_STATUS) from None
