"""Runs a program that dies with its parent: `python leash.py PARENT_PID PROGRAM [ARGUMENT ...]`. Linux only. A program
of its own, because code between fork and exec is unsafe in processes with threads, such as gRPC's."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_NOT_STARTED_STATUS = 127


def fasten(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent ends. Exits if the parent is no longer `parent_pid`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        # The parent died before the signal was set.
        sys.exit(_NOT_STARTED_STATUS)


def main() -> None:
    """Replace this process with the program, which keeps the process id."""
    parent_pid, *command = sys.argv[1:]
    fasten(int(parent_pid))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(_NOT_STARTED_STATUS)


if __name__ == "__main__":
    main()
