"""What stdout does where its reader is gone, or where its encoding lacks a character."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator

BROKEN_PIPE_STATUS = 128 + signal.SIGPIPE
"""What a shell reports of a program that ended because the reader of its pipe was gone."""


@contextlib.contextmanager
def quiet_output() -> Iterator[None]:
    r"""Exit with status 141, without a message, when the reader of stdout is gone, as in `kaveri up --help | head -1`.

    A character that stdout's encoding lacks, such as é in ASCII, is written as \xe9. stderr does so by itself.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            # Here, as a broken pipe at the interpreter's end is reported on stderr.
            sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE_STATUS) from None
