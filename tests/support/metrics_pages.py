"""Reads pages from the metrics ports of processes, with mutual TLS if the tests run with --tls."""

import ssl
import urllib.request

from kaveri.security.tls_files import TlsFiles
from tests.support.scripted_ports import inherited_tls


def read_page(address: str, path: str = "metrics", timeout_s: float = 30.0, files: TlsFiles | None = None) -> str:
    """Read a page at the metrics port "host:port". files: client certificate; None: the tests' own. Raises OSError."""
    files, scheme, context = files or inherited_tls(), "http", None
    if files is not None:
        scheme, context = "https", ssl.create_default_context(cafile=files.authority)
        # The certificate has the cluster's name.
        context.check_hostname = False
        context.load_cert_chain(files.certificate, files.key)
    with urllib.request.urlopen(f"{scheme}://{address}/{path}", timeout=timeout_s, context=context) as answer:
        text: str = answer.read().decode()
    return text


def sum_of(name: str, page: str) -> float:
    """Return the sum of a metric over all labels in a scraped page; 0 if it has no series."""
    starts = (f"{name} ", f"{name}{{")
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(starts))
