"""`kaveri simulate` reads the cluster's own file, and refuses what it cannot follow."""

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kaveri.config.presets import Preset, preset_settings
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.errors import ConfigError
from kaveri.policy.admission import AdmissionPolicy
from kaveri.policy.flipping import FlipPolicy, FlipRules
from kaveri.policy.ordering import OrderingPolicy
from kaveri.policy.placement import DecodePlacementPolicy
from kaveri.policy.replication import ReplicationMode
from kaveri.programs import setting_sections
from kaveri.simulator.spec import Overheads
from kaveri.simulator.spec_file import ReadSpec, read_overheads, read_spec
from services.decode.config import BatchConfig

GOOD = """
engine = "timed"
latency_model = "opt-13b-a100-tp2"
max_batch = 32
[up]
prefill = 3
decode = 1
[prefill]
chunk_tokens = 256
decode_placement = "heavy-light"
kv_link = "200Gbps,800KiB/token"
[decode]
max_batch = 128
kv_cache_memory = "1MiB"
max_model_len = 2048
decode_policy = "reserve-dynamic"
"""


def read(tmp_path: Path, text: str) -> ReadSpec:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return read_spec(path, setting_sections())


def test_sections_win_over_what_stands_in_front_of_them(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD)
    spec = found.spec
    assert (spec.prefill_count, spec.decode_count) == (3, 1)
    assert (spec.prefill.engine.max_batch, spec.decode.engine.max_batch) == (32, 128)
    assert (spec.prefill.engine.chunk_tokens, spec.decode.engine.chunk_tokens) == (256, 512)
    # 256 bytes a token, 16 tokens a block: as in the timed engine.
    assert spec.decode.engine.total_blocks == 256
    assert spec.prefill.decode_placement is DecodePlacementPolicy.HEAVY_LIGHT
    assert spec.decode.decode_policy is AdmissionPolicy.RESERVE_DYNAMIC
    assert spec.link is not None
    assert spec.link.token_bytes == 800 * 1024
    assert found.not_simulated == ()


def test_time_scale_slows_every_step(tmp_path: Path) -> None:
    plain, slowed = read(tmp_path, GOOD), read(tmp_path, "time_scale = 4\n" + GOOD)
    assert slowed.spec.decode.engine.latency == plain.spec.decode.engine.latency.slowed(4)
    assert slowed.not_simulated == plain.not_simulated


def test_a_setting_that_a_simulation_does_not_follow_is_named(tmp_path: Path) -> None:
    found = read(tmp_path, 'log_level = "info"\nengine = "vllm"\n' + GOOD.replace('engine = "timed"\n', ""))
    assert found.not_simulated == ("log_level", "engine")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (GOOD.replace("chunk_tokens", "chunk_size"), "chunk_size: is no setting"),
        (GOOD + "[gate]\n", r"\[gate\]: is no section"),
        (GOOD.replace('"reserve-dynamic"', '"lazy"'), "is 'lazy'; it must be one of greedy"),
        (GOOD.replace("prefill = 3", "prefill = 0"), "prefill: is 0; there must be at least 1"),
        (GOOD.replace("prefill = 3", 'prefill = "three"'), "is 'three'; it must be a whole number"),
        (GOOD.replace("prefill = 3", "colocated = 2"), "colocated: is 2; these instances do both"),
        (GOOD.replace("latency_model", "#"), "latency_model: is not given"),
        ("time_scale = 0\n" + GOOD, "time_scale: is 0.0; it must be a number above 0"),
        (GOOD.replace("opt-13b-a100-tp2", "opt-1b"), "opt-1b"),
        (GOOD.replace("200Gbps", "fast"), "'fast' is no part of a link"),
        (GOOD.replace(",800KiB/token", ""), "how large a token is"),
        (GOOD.replace("2048", "100000"), "takes 6250 blocks; the pool has 256"),
        ("]", "cannot read"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "named"),
    [("hop = 1", "hop: is no overhead"), ("hop_s = -1", "hop_s"), ('hop_s = "1"', "hop_s"), ("hop_s = nan", "hop_s")],
)
def test_overheads_are_refused_alike(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "overheads.toml"
    path.write_text("hop_s = 0.001\npush_tail_s = 0.002\n")
    assert read_overheads(path) == Overheads(hop_s=0.001, push_tail_s=0.002)
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_overheads(path)


def test_the_command_prints_the_json_of_bench_and_compares_with_one(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(GOOD)
    (tmp_path / "overheads.toml").write_text("hop_s = 0.001\n")
    first = _simulate(tmp_path, "--rate", "5", "--requests", "20", "--max-output", "200", "--json")
    (run,) = first["runs"]
    assert run["answered"] == len(run["rows"]) == 20
    assert not first["simulated"]["overheads_given"]
    (tmp_path / "bench.json").write_text(json.dumps(first))
    again = _simulate(tmp_path, "--compare", "bench.json", "--overheads", "overheads.toml", "--json")
    assert again["simulated"]["overheads_given"]
    slower = {entry["figure"]: entry["difference"] for entry in again["differences"]}
    assert 0 < slower["ttft_s mean"] < 0.2, "four hops of a millisecond"


def _simulate(folder: Path, *arguments: str) -> Any:
    return json.loads(_run(folder, *arguments))


def _run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", "from kaveri.cli.main import main; main()", "simulate", "cluster.toml", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=100)
    return done.stdout


def test_a_preset_counts_where_the_file_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('latency_model = "opt-13b-a100-tp2"\n[up]\nprefill = 3\n[prefill]\nprefill_policy = "ljf"\n')
    sections = preset_settings(Preset.TETRIINFER).sections
    found = read_spec(path, setting_sections(), sections)
    assert (found.spec.prefill_count, found.spec.decode_count) == (3, 2)
    assert found.spec.prefill.prefill_policy is OrderingPolicy.LJF
    assert found.spec.prefill.decode_placement is DecodePlacementPolicy.HEAVY_LIGHT
    assert found.spec.decode.decode_policy is AdmissionPolicy.RESERVE_DYNAMIC
    assert found.not_simulated == ("[prefill] prediction",)


@pytest.mark.parametrize("preset", list(Preset))
def test_each_preset_is_simulated(preset: Preset, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('latency_model = "opt-13b-a100-tp2"\n')
    report = _simulate(tmp_path, "--preset", preset, "--rate", "5", "--requests", "20", "--json")
    assert [run["answered"] for run in report["runs"]] == [20]
    assert report["simulated"]["preset"] == preset
    assert report["simulated"]["left_out"]
    role = "colocated" if preset is Preset.ACCELLM else "prefill"
    assert f"[{role}] prediction" in report["simulated"]["not_simulated"]


def test_the_preset_of_pairs_has_instances_of_both_phases_that_hold_copies_of_each_other(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('latency_model = "opt-13b-a100-tp2"\n')
    arguments = ("--preset", "accellm", "--rate", "5", "--requests", "20")
    report = _simulate(tmp_path, *arguments, "--json")
    (run,) = report["runs"]
    placed = {row["server"]["decode_instance_id"] for row in run["rows"]}
    assert placed == {"colocated-0", "colocated-1"}
    assert set(run["resource_time"]) == {"prefill+decode"}
    assert not any("repli" in name for name in report["simulated"]["not_simulated"])
    assert run["losses"]["requests"] == 0
    assert "lost with an instance" not in _run(tmp_path, *arguments)
    said = _run(tmp_path, *arguments, "--fail", "colocated-0@3s")
    assert re.search(
        r"^lost with an instance: \d+ requests, [1-9]\d* resumes from copies, \d+ tokens computed again,"
        r" stalls of 0\.\d+ s on average$",
        said,
        re.MULTILINE,
    )
    (run,) = _simulate(tmp_path, *arguments, "--fail", "colocated-0@3s", "--json")["runs"]
    assert run["answered"] == 20
    resumed = [row["server"] for row in run["rows"] if row["server"]["resumes"]]
    assert {server["decode_instance_id"] for server in resumed} == {"colocated-1"}
    assert max(server["recomputed_tokens"] for server in resumed) <= 32


def test_settings_of_copies_have_the_names_and_units_of_the_services(tmp_path: Path) -> None:
    text = 'latency_model = "opt-13b-a100-tp2"\n[decode]\n'
    copies = read(tmp_path, text).spec.decode.copies
    services = {entry.name: entry.default for entry in fields(BatchConfig)}
    token_bytes = FakeModel().layout.token_bytes
    assert copies.replication is services["replication"] is ReplicationMode.OFF
    assert copies.replica_blocks * 16 * token_bytes == services["replica_memory"]
    assert (copies.replica_min_tokens, copies.orphan_grace_s) == (
        services["replica_min_tokens"],
        services["orphan_grace_s"],
    )
    text += 'replication = "spread"\nreplica_memory = "1MiB"\nreplica_min_tokens = 5\nreplication_rate = "1MiB"\n'
    copies = read(tmp_path, text).spec.decode.copies
    assert copies.replication is ReplicationMode.SPREAD
    assert copies.replica_blocks == copies.blocks_per_s == 2**20 // (16 * token_bytes)
    with pytest.raises(ConfigError, match=r"\[decode\] replication: is 'three'; it must be one of off, pair"):
        read(tmp_path, 'latency_model = "opt-13b-a100-tp2"\n[decode]\nreplication = "three"\n')


def test_a_section_of_instances_of_both_phases_has_the_settings_of_both(tmp_path: Path) -> None:
    text = 'latency_model = "opt-13b-a100-tp2"\n[up]\ncolocated = 3\n[colocated]\nmax_batch = 32\nchunk_tokens = 256\n'
    spec = read(tmp_path, text + 'prefill_policy = "sjf"\ndecode_policy = "reserve-static"\n').spec
    assert spec.instance_ids == ("colocated-0", "colocated-1", "colocated-2")
    assert spec.prefill.engine == spec.decode.engine
    assert (spec.prefill.engine.max_batch, spec.prefill.engine.chunk_tokens) == (32, 256)
    assert spec.prefill.prefill_policy is OrderingPolicy.SJF
    assert spec.decode.decode_policy is AdmissionPolicy.RESERVE_STATIC


DYNAMIC = """
latency_model = "opt-13b-a100-tp2"
[up]
dynamic = 4
[router]
slo_ttft_s = 1
slo_tpot_s = 0.03
"""


def test_a_file_names_instances_that_change_their_phase_and_by_which_rules(tmp_path: Path) -> None:
    found = read(tmp_path, DYNAMIC + "flip_dry_run = true\n")
    assert found.spec.instance_ids == ("dynamic-0", "dynamic-1", "dynamic-2", "dynamic-3")
    assert found.spec.flips == FlipRules(policy=FlipPolicy.SLO, ttft_s=1.0, tpot_s=0.03)
    assert found.not_simulated == ("[router] flip_dry_run",)
    rules = 'flip_policy = "idle"\nmin_prefill = 2\nmin_decode = 1\nflip_cooldown_s = 3\n'
    given = FlipRules(policy=FlipPolicy.IDLE, ttft_s=1.0, tpot_s=0.03, min_prefill=2, min_decode=1, cooldown_s=3.0)
    assert read(tmp_path, DYNAMIC + rules).spec.flips == given
    still = DYNAMIC.replace("slo_ttft_s = 1\nslo_tpot_s = 0.03", 'flip_policy = "none"')
    assert read(tmp_path, still).spec.flips == FlipRules()


def test_fixed_instances_do_not_follow_the_rules_of_changes(tmp_path: Path) -> None:
    found = read(tmp_path, DYNAMIC.replace("dynamic = 4", "prefill = 3"))
    assert (found.spec.prefill_count, found.spec.decode_count) == (3, 2)
    assert found.not_simulated == ("[router] slo_ttft_s", "[router] slo_tpot_s")


def test_a_preset_of_a_fixed_split_leaves_its_policies_to_instances_that_change(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(DYNAMIC)
    spec = read_spec(path, setting_sections(), preset_settings(Preset.TETRIINFER).sections).spec
    assert (spec.prefill_count, spec.decode_count, spec.dynamic_count) == (0, 0, 4)
    assert spec.decode.decode_policy is AdmissionPolicy.RESERVE_DYNAMIC
    with pytest.raises(ConfigError, match=r"\[up\] dynamic: is 4; these instances do either phase"):
        read_spec(path, setting_sections(), preset_settings(Preset.ACCELLM).sections)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (DYNAMIC.replace("4", '"four"'), r"\[up\] dynamic: is 'four'; it must be a whole number"),
        (DYNAMIC.replace("4", "1"), r"dynamic: is 1; it must be at least 1 \+ 1"),
        (DYNAMIC.replace("[router]", "decode = 1\n[router]"), r"\[up\] dynamic: is 4; these instances do either"),
        (DYNAMIC.replace("[router]", "colocated = 1\n[router]"), r"\[up\] dynamic: is 4; these instances do either"),
        (DYNAMIC + "[decode]\nmax_batch = 8\n", r"\[up\] dynamic: is 4; \[prefill\] and \[decode\] must then"),
        (DYNAMIC + 'flip_policy = "often"', r"flip_policy: is 'often'; it must be one of none, idle, slo"),
        (DYNAMIC.replace("slo_ttft_s = 1", ""), r"flip_policy: is auto, and without targets nothing changes"),
        (DYNAMIC.replace("ttft_s = 1", "ttft_s = -1"), r"\[router\] slo_ttft_s: is -1"),
        (DYNAMIC.replace("tpot_s = 0.03", "tpot_s = nan"), r"\[router\] slo_tpot_s: is nan"),
        (DYNAMIC.replace("ttft_s = 1", 'ttft_s = "1"'), r"\[router\] slo_ttft_s: is '1'; it must be a number"),
        (DYNAMIC + "min_prefill = 0", r"\[router\] min_prefill: is 0; at least 1 instance"),
        (DYNAMIC + "min_decode = 0.5", r"\[router\] min_decode: is 0.5; it must be a whole number"),
        (DYNAMIC + "min_decode = 4", r"dynamic: is 4; it must be at least 1 \+ 4"),
        (DYNAMIC + "flip_cooldown_s = 0", r"\[router\] flip_cooldown_s: is 0"),
    ],
)
def test_instances_that_change_their_phase_are_refused_with_the_setting(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, text)


def test_instances_that_change_their_phase_are_shown_with_both(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(DYNAMIC)
    (run,) = _simulate(tmp_path, "--rate", "5", "--requests", "20", "--json")["runs"]
    assert run["answered"] == 20
    assert {key: time["instances"] for key, time in run["resource_time"].items()} == {"prefill+decode": 4}


def test_a_baseline_is_simulated_on_as_many_instances(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(GOOD)
    arguments = ("--baseline", "prefill-first", "--rate", "5", "--requests", "20", "--max-output", "200")
    report = _simulate(tmp_path, *arguments, "--json")
    (run,) = report["runs"]
    assert run["answered"] == 20
    placed = {row["server"]["decode_instance_id"] for row in run["rows"]}
    assert placed == {f"baseline-{number}" for number in range(4)}
    with pytest.raises(subprocess.CalledProcessError) as refused:
        _simulate(tmp_path, *arguments, "--fail", "decode-0@3s")
    assert "--fail: is given; --baseline prefill-first does not follow it" in refused.value.stderr
