"""Records which functions of Kaveri a process calls. Python loads this at start when its folder is on PYTHONPATH.

Each SIGUSR2 ends a window: the functions called in it are written to $TRACE_CALLS_TO/PID.NUMBER as lines `file:line
qualified name`. In the first window, which begins with the process, only threads other than the main one are recorded,
because recording slows down imports."""

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
    """Records the functions of Kaveri that are called, until SIGUSR2 writes them to a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._called: set[CodeType] = set()
        self._window = 0

    def start(self) -> None:
        """Start recording: threads that start from now on, and after the first SIGUSR2 the main thread too."""
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
