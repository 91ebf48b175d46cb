from pathlib import Path

import pytest

from tests.library.cli.conftest import Run


def test_it_shows_every_setting_its_value_and_its_origin_without_secrets(tmp_path: Path, kaveri: Run) -> None:
    path = tmp_path / "kaveri.toml"
    path.write_text("dtype = 'float32'\nmax_requests = 9\n[decode]\nmax_batch = 8\n")
    flags = ("--config", str(path), "--kv-port", "7")
    shown = kaveri(
        "config",
        "show",
        "decode",
        *flags,
        KAVERI_REDIS_URL="redis://:hunter2@redis:6379/0",
        KAVERI_ROUTER_SERVICE_HOST="::1",
    )
    assert shown.returncode == 0, shown.stderr
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in shown.stdout.splitlines()}
    assert " ".join(rows["dtype"].split()) == f"float32 {path} dtype"
    assert " ".join(rows["max_batch"].split()) == f"8 {path} [decode] max_batch"
    assert " ".join(rows["kv_port"].split()) == "7 --kv-port"
    assert " ".join(rows["max_model_len"].split()) == "0 default"
    assert rows["redis_url"].split() == ["redis://***@redis:6379/0", "KAVERI_REDIS_URL"]
    assert "enableServiceLinks: false" in rows["KAVERI_ROUTER_SERVICE_HOST"]
    assert "hunter2" not in shown.stdout
    assert "max_requests" not in rows


@pytest.mark.parametrize("role", ["router", "prefill", "decode", "colocated", "predictor"])
def test_it_knows_every_service(kaveri: Run, role: str) -> None:
    shown = kaveri("config", "show", role)
    assert shown.returncode == 0, shown.stderr
    assert len(shown.stdout.splitlines()) > 15


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["decde"], "kaveri: ROLE: is 'decde'; choose router, prefill, decode, colocated, predictor, gateway, profile"),
        (["decode", "--max-btch", "8"], "kaveri: --max-btch: is no flag of kaveri decode; the nearest is --max-batch"),
        (["decode", "--max-batch", "0"], "kaveri: --max-batch: is 0; it must be at least 1"),
    ],
)
def test_what_is_wrong_is_one_line(kaveri: Run, arguments: list[str], line: str) -> None:
    shown = kaveri("config", "show", *arguments)
    assert (shown.returncode, shown.stdout) == (2, "")
    (told,) = shown.stderr.splitlines()
    assert told.startswith(line)
