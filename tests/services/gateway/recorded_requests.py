"""Requests as real clients sent them, recorded by a socket that wrote down what came. The port is written as 8000.

Java 17.0.15's HttpClient with its default settings, and curl 7.88.1."""

OFFERS: dict[str, bytes] = {
    "Java 17, length": (
        b"POST /v1/completions HTTP/1.1\r\n"
        b"Connection: Upgrade, HTTP2-Settings\r\n"
        b"Content-Length: 62\r\n"
        b"Host: 127.0.0.1:8000\r\n"
        b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\n"
        b"Upgrade: h2c\r\n"
        b"User-Agent: Java-http-client/17.0.15\r\n"
        b"Content-Type: application/json\r\n"
        b"\r\n"
        b'{"prompt": [300, 301, 302], "max_tokens": 5, "temperature": 0}'
    ),
    "Java 17, chunks": (
        b"POST /v1/completions HTTP/1.1\r\n"
        b"Connection: Upgrade, HTTP2-Settings\r\n"
        b"Host: 127.0.0.1:8000\r\n"
        b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\n"
        b"Transfer-encoding: chunked\r\n"
        b"Upgrade: h2c\r\n"
        b"User-Agent: Java-http-client/17.0.15\r\n"
        b"Content-Type: application/json\r\n"
        b"\r\n"
        b"3e\r\n"
        b'{"prompt": [300, 301, 302], "max_tokens": 5, "temperature": 0}\r\n'
        b"0\r\n"
        b"\r\n"
    ),
    "curl --http2, length": (
        b"POST /v1/completions HTTP/1.1\r\n"
        b"Host: 127.0.0.1:8000\r\n"
        b"User-Agent: curl/7.88.1\r\n"
        b"Accept: */*\r\n"
        b"Connection: Upgrade, HTTP2-Settings\r\n"
        b"Upgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
        b"Content-Type: application/json\r\n"
        b"Content-Length: 62\r\n"
        b"\r\n"
        b'{"prompt": [300, 301, 302], "max_tokens": 5, "temperature": 0}'
    ),
    "curl --http2, chunks": (
        b"POST /v1/completions HTTP/1.1\r\n"
        b"Host: 127.0.0.1:8000\r\n"
        b"User-Agent: curl/7.88.1\r\n"
        b"Accept: */*\r\n"
        b"Connection: Upgrade, HTTP2-Settings\r\n"
        b"Upgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
        b"Content-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n"
        b"\r\n"
        b"3e\r\n"
        b'{"prompt": [300, 301, 302], "max_tokens": 5, "temperature": 0}\r\n'
        b"0\r\n"
        b"\r\n"
    ),
    "curl, websocket": (
        b"POST /v1/completions HTTP/1.1\r\n"
        b"Host: 127.0.0.1:8000\r\n"
        b"User-Agent: curl/7.88.1\r\n"
        b"Accept: */*\r\n"
        b"Content-Type: application/json\r\n"
        b"Connection: Upgrade\r\n"
        b"Upgrade: websocket\r\n"
        b"Content-Length: 62\r\n"
        b"\r\n"
        b'{"prompt": [300, 301, 302], "max_tokens": 5, "temperature": 0}'
    ),
    "curl, TLS": (
        b"POST /v1/completions HTTP/1.1\r\n"
        b"Host: 127.0.0.1:8000\r\n"
        b"User-Agent: curl/7.88.1\r\n"
        b"Accept: */*\r\n"
        b"Content-Type: application/json\r\n"
        b"Connection: Upgrade\r\n"
        b"Upgrade: TLS/1.2, HTTP/1.1\r\n"
        b"Content-Length: 62\r\n"
        b"\r\n"
        b'{"prompt": [300, 301, 302], "max_tokens": 5, "temperature": 0}'
    ),
}
"""With offers to upgrade."""
PLAIN: dict[str, bytes] = {
    "curl": (
        b"POST /v1/completions HTTP/1.1\r\n"
        b"Host: 127.0.0.1:8000\r\n"
        b"User-Agent: curl/7.88.1\r\n"
        b"Accept: */*\r\n"
        b"Content-Type: application/json\r\n"
        b"Content-Length: 62\r\n"
        b"\r\n"
        b'{"prompt": [300, 301, 302], "max_tokens": 5, "temperature": 0}'
    ),
    "curl --http1.0": (
        b"POST /v1/completions HTTP/1.0\r\n"
        b"Host: 127.0.0.1:8000\r\n"
        b"User-Agent: curl/7.88.1\r\n"
        b"Accept: */*\r\n"
        b"Content-Type: application/json\r\n"
        b"Content-Length: 62\r\n"
        b"\r\n"
        b'{"prompt": [300, 301, 302], "max_tokens": 5, "temperature": 0}'
    ),
    "curl, Expect": (
        b"POST /v1/completions HTTP/1.1\r\n"
        b"Host: 127.0.0.1:8000\r\n"
        b"User-Agent: curl/7.88.1\r\n"
        b"Accept: */*\r\n"
        b"Content-Type: application/json\r\n"
        b"Expect: 100-continue\r\n"
        b"Content-Length: 62\r\n"
        b"\r\n"
        b'{"prompt": [300, 301, 302], "max_tokens": 5, "temperature": 0}'
    ),
}
"""Without."""
