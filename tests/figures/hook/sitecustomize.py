"""Records which functions of Kaveri a process calls. Python loads it at start when its folder is on PYTHONPATH.

TRACE_CALLS_TO: each SIGUSR2 ends a window: the calls of the window are written to FOLDER/PID.NUMBER as lines
`file:line qualified name`, and the next window begins. In the first window, from the start of the process on, only
threads other than the main one are recorded: recording slows down imports.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_ROOT = str(Path(__file__).resolve().parents[3]) + os.sep
_ROOMS = (_ROOT + "kaveri" + os.sep, _ROOT + "services" + os.sep)


class CallRecorder:
    """The functions called since the last window's end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._called: set[CodeType] = set()
        self._window = 0

    def start(self) -> None:
        """Records the threads that start from now on, and the main thread after the first window."""
        signal.signal(signal.SIGUSR2, self._end_window)
        threading.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._called.add(frame.f_code)

    def _end_window(self, signal_number: int, frame: FrameType | None) -> None:
        sys.setprofile(self._on_event)
        called, self._called = self._called, set()
        lines = [
            f"{code.co_filename.removeprefix(_ROOT)}:{code.co_firstlineno} {code.co_qualname}"
            for code in called
            if code.co_filename.startswith(_ROOMS)
        ]
        path = self._folder / f"{os.getpid()}.{self._window}"
        self._window += 1
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("\n".join(sorted(lines)))
        unfinished.rename(path)


if _folder := os.environ.get("TRACE_CALLS_TO"):
    CallRecorder(Path(_folder)).start()
