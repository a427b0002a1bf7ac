"""What each process of a deployment is told."""

import pytest

from services.gateway.settings import GatewaySettings
from services.launcher.plan import Options, Place, Plan
from services.runtime.settings import ProcessSettings


def environment(plan: Plan, name: str) -> dict[str, str]:
    return dict(plan.spec(plan.members[name]).env)


def test_the_members_start_with_what_others_lean_on() -> None:
    plan = Plan(Options(prefill=2, decode=1))
    assert list(plan.members) == ["nats", "kvtransfer", "prefill-0", "prefill-1", "decode-0", "gateway"]
    ports = [port for member in plan.members.values() for port in (member.port, member.admin_port)]
    assert len(set(ports)) == 12


def test_no_prefill_worker_is_a_deployment_too() -> None:
    assert [member.role for member in Plan(Options(prefill=0, decode=2)).of_role("prefill", "decode")] == ["decode"] * 2


def test_processes_find_one_another() -> None:
    plan = Plan(Options())
    env = environment(plan, "decode-0")
    assert env["PDSERVE_NATS_URL"] == f"nats://127.0.0.1:{plan.members['nats'].port}"
    assert env["PDSERVE_DIRECTORY"] == f"127.0.0.1:{plan.members['kvtransfer'].port}"
    command = plan.spec(plan.members["nats"]).command
    assert command[0].endswith("/nats-server")
    assert command[1:] == (
        "-a",
        "127.0.0.1",
        "-p",
        str(plan.members["nats"].port),
        "-m",
        str(plan.members["nats"].admin_port),
    )


def test_the_gateway_settings_read_what_the_plan_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(Options(model="tiny-random-llama", port=8123))
    for name, value in environment(plan, "gateway").items():
        monkeypatch.setenv(name, value)
    settings = GatewaySettings(_cli_parse_args=False)
    assert (settings.port, settings.model, settings.worker_id) == (8123, "tiny-random-llama", "gateway")
    assert settings.admin_port == plan.members["gateway"].admin_port


def test_pools_are_sized_apart() -> None:
    plan = Plan(Options(kv_memory_mb_prefill=100, kv_memory_mb_decode=300, threads=3, dtype="float32", transport="shm"))
    prefill, decode, gateway = (environment(plan, name) for name in ("prefill-0", "decode-0", "gateway"))
    assert (prefill["PDSERVE_KV_MEMORY_MB"], decode["PDSERVE_KV_MEMORY_MB"]) == ("100", "300")
    assert (prefill["OMP_NUM_THREADS"], decode["PDSERVE_THREADS"], gateway["OMP_NUM_THREADS"]) == ("3", "3", "1")
    assert (decode["PDSERVE_DTYPE"], decode["PDSERVE_TRANSPORT"]) == ("float32", "shm")
    assert "PDSERVE_TRANSPORT" not in gateway


def test_the_nearer_environment_wins_and_the_drain_time_counts() -> None:
    env = {
        "*": {"A": "all", "B": "all"},
        "prefill": {"B": "role", "C": "role"},
        "prefill-1": {"C": "one", "PDSERVE_DRAIN_S": "3"},
    }
    plan = Plan(Options(prefill=2, env=env))
    first, second = environment(plan, "prefill-0"), environment(plan, "prefill-1")
    assert [first[key] for key in "ABC"] == ["all", "role", "role"]
    assert [second[key] for key in "ABC"] == ["all", "role", "one"]
    assert plan.spec(plan.members["prefill-1"]).stop_s == 13
    assert plan.spec(plan.members["prefill-0"]).stop_s == ProcessSettings(_cli_parse_args=False).drain_s + 10


def test_a_process_in_another_place_listens_and_is_reached_there() -> None:
    place = Place("10.77.0.2", ("ip", "netns", "exec", "pd-a"))
    plan = Plan(Options(places={"prefill-0": place}))
    spec = plan.spec(plan.members["prefill-0"])
    assert spec.command[:4] == ("ip", "netns", "exec", "pd-a")
    assert spec.env["PDSERVE_HOST"] == spec.env["PDSERVE_ADVERTISE_HOST"] == "10.77.0.2"
    assert plan.members["prefill-0"].ready_url.startswith("http://10.77.0.2:")
    assert environment(plan, "decode-0")["PDSERVE_HOST"] == "127.0.0.1"
