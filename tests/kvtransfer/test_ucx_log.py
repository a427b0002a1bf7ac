"""UCX's own tables, as UCX 1.23 printed them, read for the path of READ transfers."""

from __future__ import annotations

import os

import pytest

from services.kvtransfer.ucx_log import UcxLog, kind_of

HEAD = "[1796076236.390124] [vm:5061 :0]   "


def table(who: str, what: str, *rows: tuple[str, str, str]) -> str:
    lines = ["+---+---+---+", f"| {who}   |", f"| {what} |", "+---+---+---+", "| Range  | Description | Config   |"]
    lines += ["+---+---+---+"]
    lines += [f"| {size:>6} | {how:<12} | {path:<12} |" for size, how, path in rows]
    return "".join(f"{HEAD}{line}\n" for line in [*lines, "+---+---+---+"])


READ = "remote memory read by ucp_get*(multi) into host memory from host"


def paths_of(text: str) -> list[str]:
    log = UcxLog()
    log._file = os.memfd_create("test")
    os.write(log._file, text.encode())
    try:
        return log.paths()
    finally:
        os.close(log._file)


def test_only_reads_from_other_processes_count() -> None:
    text = (
        table("a self cfg#0", READ, ("0..inf", "zero-copy", "self/memory"))
        + table("a intra-node cfg#1", "active message by ucp_am_send*", ("0..inf", "zero-copy", "tcp/lo"))
        + table("a intra-node cfg#1", READ, ("0..1024", "short", "tcp/lo"), ("1025..inf", "zero-copy", "cma/memory"))
    )
    assert paths_of(text) == ["cma"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (("0..inf", "software emulation", "tcp/lo"), ["tcp"]),
        (("0..inf", "zero-copy", "52% on rc_mlx5/mlx5_0:1 and 48% on rc_mlx5/mlx5_1:1"), ["rdma"]),
        (("16K..inf", "zero-copy", "cuda_ipc/cuda"), ["cuda_ipc"]),
        (("0..inf", "copy-in", "posix/memory"), ["shm"]),
    ],
)
def test_paths_have_the_names_people_know(row: tuple[str, str, str], expected: list[str]) -> None:
    assert paths_of(table("a inter-node cfg#3", READ, row)) == expected


def test_unknown_resources_stay_as_they_are() -> None:
    assert [kind_of(name) for name in ("dc_mlx5", "srd", "sysv", "tcp", "brand_new")] == [
        "rdma",
        "rdma",
        "shm",
        "tcp",
        "brand_new",
    ]


def test_problems_are_passed_on_once() -> None:
    log = UcxLog()
    log._file = os.memfd_create("test")
    os.write(log._file, b"[1.2] [vm:1 :0]  parser.c:1 UCX  WARN  unused environment variable: UCX_TSL\npart of a li")
    assert log.take_problems() == ["unused environment variable: UCX_TSL"]
    assert log.take_problems() == []
    os.close(log._file)


def test_a_log_of_the_users_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_LOG_LEVEL", "debug")
    log = UcxLog()
    with log.captured():
        assert "UCX_LOG_FILE" not in os.environ
        assert os.environ["UCX_LOG_LEVEL"] == "debug"
    assert log.paths() == []
