"""Serves Prometheus metrics over HTTP. Each service declares its own in its metrics.py."""

from prometheus_client import disable_created_metrics, start_http_server

from kaveri.errors import ConfigError

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def serve_metrics(host: str, port: int) -> None:
    """Serves the process's metrics at http://host:port/metrics on a thread of its own; port 0 serves none.

    Raises ConfigError when the address cannot be had.
    """
    if port == 0:
        return
    # A second series per series, with the time of its birth: nobody asked for it.
    disable_created_metrics()
    try:
        start_http_server(port, addr=host)
    except OSError as error:
        raise ConfigError("--metrics-port", f"cannot listen on {host}:{port}: {error.strerror}") from error
