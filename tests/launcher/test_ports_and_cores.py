"""Where processes listen, and on how many threads they compute."""

import socket
from pathlib import Path

import pytest

from services.launcher.cores import thread_env, threads_per_worker
from services.launcher.ports import free_port, is_free


def test_ports_are_distinct_and_below_the_range_of_outgoing_connections() -> None:
    ports = [free_port() for _ in range(50)]
    lowest_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 50
    assert all(10_000 <= port < max(lowest_ephemeral, 11_000) for port in ports)


def test_a_port_somebody_listens_on_is_not_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not is_free(port)
    assert is_free(port)


@pytest.mark.parametrize(("workers", "cores", "threads"), [(2, 2, 1), (3, 2, 1), (1, 2, 2), (2, 64, 32), (0, 4, 4)])
def test_cores_are_shared_out_evenly_and_nobody_gets_none(workers: int, cores: int, threads: int) -> None:
    assert threads_per_worker(workers, cores) == threads


def test_waiting_threads_sleep() -> None:
    assert thread_env(3)["OMP_WAIT_POLICY"] == "passive"
    assert thread_env(3)["OMP_NUM_THREADS"] == "3"
