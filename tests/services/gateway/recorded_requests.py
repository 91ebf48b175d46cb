"""Requests recorded from Java 17.0.15's HttpClient with its default settings and from curl 7.88.1, to port 8000."""

_BODY = b'{"prompt": [300, 301, 302], "max_tokens": 5, "temperature": 0}'
_CHUNKS = b"3e\r\n" + _BODY + b"\r\n0\r\n\r\n"
_POST = b"POST /v1/completions HTTP/1.1\r\n"
_HOST = b"Host: 127.0.0.1:8000\r\n"
_JSON = b"Content-Type: application/json\r\n"
_LENGTH = b"Content-Length: 62\r\n"
_SETTINGS = b"Connection: Upgrade, HTTP2-Settings\r\n"
_TO_H2C = b"Upgrade: h2c\r\n"
_JAVA_SETTINGS = b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\n"
_JAVA_END = _TO_H2C + b"User-Agent: Java-http-client/17.0.15\r\n" + _JSON + b"\r\n"
_CURL = _HOST + b"User-Agent: curl/7.88.1\r\nAccept: */*\r\n"
_CURL_H2C = _POST + _CURL + _SETTINGS + _TO_H2C + b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n" + _JSON
_CURL_UPGRADE = _POST + _CURL + _JSON + b"Connection: Upgrade\r\nUpgrade: "

OFFERS: dict[str, bytes] = {
    "Java 17, length": _POST + _SETTINGS + _LENGTH + _HOST + _JAVA_SETTINGS + _JAVA_END + _BODY,
    "Java 17, chunks": _POST
    + _SETTINGS
    + _HOST
    + _JAVA_SETTINGS
    + b"Transfer-encoding: chunked\r\n"
    + _JAVA_END
    + _CHUNKS,
    "curl --http2, length": _CURL_H2C + _LENGTH + b"\r\n" + _BODY,
    "curl --http2, chunks": _CURL_H2C + b"Transfer-Encoding: chunked\r\n\r\n" + _CHUNKS,
    "curl, websocket": _CURL_UPGRADE + b"websocket\r\n" + _LENGTH + b"\r\n" + _BODY,
    "curl, TLS": _CURL_UPGRADE + b"TLS/1.2, HTTP/1.1\r\n" + _LENGTH + b"\r\n" + _BODY,
}
"""Requests that offer an upgrade of the protocol, by client."""
PLAIN: dict[str, bytes] = {
    "curl": _POST + _CURL + _JSON + _LENGTH + b"\r\n" + _BODY,
    "curl --http1.0": _POST.replace(b"1.1", b"1.0") + _CURL + _JSON + _LENGTH + b"\r\n" + _BODY,
    "curl, Expect": _POST + _CURL + _JSON + b"Expect: 100-continue\r\n" + _LENGTH + b"\r\n" + _BODY,
}
"""Requests that offer no upgrade, by client."""
