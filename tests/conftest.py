"""Common to all tests: options, TLS, and one thread of arithmetic per process, as several engines share few cores."""

import gc
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import structlog
from hypothesis import Phase, settings

# No test asserts on time spent, and so no example of a property has a limit either. A failing seed is printed.
settings.register_profile("kaveri", deadline=None, print_blob=True)
# For mutants: any failure will do, so examples are not shrunk, which takes minutes.
settings.register_profile("mutants", deadline=None, phases=(Phase.explicit, Phase.generate))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kaveri"))

# Read by torch when it is first imported, here and in every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# gRPC's core would write about every connection that a test breaks, in the middle of pytest's dots.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# structlog's own default shows the local variables of every frame of a traceback: half a second for one that a test
# brings on.
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S"),
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)

# A shell without job control starts background commands with SIGINT ignored, and so would be their children, to which
# some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """--engine: engine for service tests that run on any; `make test-vllm` passes vllm. --tls: mutual TLS on every gRPC
    port and channel, also in processes that tests start."""
    parser.addoption("--engine", choices=("fake", "vllm"), default="fake", help="of the service tests")
    parser.addoption("--tls", action="store_true", help="mutual TLS on every gRPC port and channel")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "shows_no_certificate: its clients connect without TLS; skipped with --tls")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --tls, skip tests whose clients cannot show a certificate."""
    if config.getoption("--tls"):
        for item in items:
            if item.get_closest_marker("shows_no_certificate"):
                item.add_marker(pytest.mark.skip(reason="its clients show no certificate"))


@pytest.fixture(scope="session", autouse=True)
def _mutual_tls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not request.config.getoption("--tls"):
        yield
        return
    # Not at the top: most tests need no gRPC.
    from kaveri.rpc.tls import RpcTls, use_tls
    from tests.support.certificates import Authority

    files = Authority(tmp_path_factory.mktemp("tls")).certify("service")
    # For the processes that tests start.
    variables = {"KAVERI_TLS_CERT": files.certificate, "KAVERI_TLS_KEY": files.key, "KAVERI_TLS_CA": files.authority}
    os.environ.update(variables)
    use_tls(RpcTls(files))
    yield
    use_tls(None)
    for name in variables:
        del os.environ[name]


@pytest.fixture(scope="session")
def _start_warm() -> Iterator[Callable[..., Any]]:
    # Not at the top: few tests start processes.
    from tests.support.warm_processes import warm_processes

    with warm_processes() as start:
        yield start


@pytest.fixture(scope="module")
def warm_services(_start_warm: Callable[..., Any]) -> Iterator[None]:
    """Make a local stack start its services by forking warm processes: imports take most of a start."""
    from kaveri.local.process import ChildProcess

    with mock.patch.object(ChildProcess, "start", staticmethod(_start_warm)):
        yield


def pytest_collection_finish() -> None:
    """Exempt the collected tests from garbage collection: each full collection would visit all of them."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report why tests were skipped: one line per reason, with the number of tests."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.section("skipped")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5d}  {reason}")
