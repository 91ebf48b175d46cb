"""Exits with 0 when /readyz on --health-port answers 200, else with 1. The health check of Kaveri's images.

Only `socket` is imported: a container runs this every few seconds.
"""

import os
import socket
import sys


def main() -> int:
    """Returns the exit status. Raises OSError when nothing answers within 2 s; Python then exits with 1, too."""
    with socket.create_connection(("127.0.0.1", int(os.environ["KAVERI_HEALTH_PORT"])), timeout=2) as connection:
        connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        # The status line is shorter than the first segment.
        return 0 if connection.recv(64).split(b" ")[1:2] == [b"200"] else 1


if __name__ == "__main__":
    sys.exit(main())
