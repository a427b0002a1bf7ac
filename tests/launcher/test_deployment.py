"""A whole deployment of the tiny model, and the `pdserve` command as a user runs it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import psutil
import pytest

from services.launcher.deployment import Deployment, StartError
from services.launcher.ports import free_port
from services.launcher.sweeper import SEGMENT_FOLDER, SEGMENT_PREFIX

pytestmark = pytest.mark.e2e

MODEL = "tiny-random-llama"
SMALL = {"*": {"PDSERVE_NUM_BLOCKS": "64", "PDSERVE_DRAIN_S": "5"}}
Eventually = Callable[..., None]


def segments() -> set[str]:
    return {path.name for path in SEGMENT_FOLDER.glob(f"{SEGMENT_PREFIX}*")}


def complete(url: str) -> str:
    body = {"model": MODEL, "prompt": "To be, or not to be", "max_tokens": 4, "temperature": 0}
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60.0, trust_env=False)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_a_deployment_serves_and_leaves_nothing() -> None:
    before = segments()
    with Deployment(model=MODEL, prefill=1, decode=1, transport="shm", dtype="float32", env=SMALL) as house:
        processes = [psutil.Process(house.pid(name) or 0) for name in house.members]
        first = complete(house.gateway_url)
        assert complete(house.gateway_url) == first
        assert house.samples("decode-0").total("pdserve_kvtransfer_pulled_blocks_total", transport="shm") > 0
        assert len(segments() - before) == 2
        assert house.debug("prefill-0", "blocks")["total"] == 64
        assert {house.stop(name) for name in ("gateway", "decode-0")} == {0}
        house.kill("prefill-0")
    assert [process for process in processes if process.is_running()] == []
    assert segments() - before == set()


def test_what_is_killed_comes_back_at_the_same_address(eventually: Eventually) -> None:
    lines: list[str] = []
    options = {"model": MODEL, "prefill": 0, "decode": 1, "dtype": "float32", "env": SMALL}
    with Deployment(**options, restart=True, log=lambda name, line: lines.append(f"{name} {line}")) as house:
        first = complete(house.gateway_url)
        killed = house.pid("decode-0")
        house.kill("decode-0")
        eventually(lambda: house.pid("decode-0") not in (None, killed), "a new life")
        assert "decode-0 ended: SIGKILL; starting again in 0.5 s" in lines
        house.wait_ready("decode-0")
        eventually(lambda: httpx2.get(f"{house.gateway_url}/ready", trust_env=False).status_code == 200, "ready again")
        assert complete(house.gateway_url) == first


def test_a_process_that_cannot_start_is_named_with_its_last_words() -> None:
    with pytest.raises(StartError, match=r"(?s)decode-0 ended with \d.*decode-0 \| .*dtype"):
        Deployment(model=MODEL, prefill=0, dtype="float31").__enter__()


@pytest.fixture
def up(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`pdserve up` with as many prefill workers as the test's parameter says, once it says that it is up."""
    port = free_port()
    command = "from services.launcher.cli import main; main()"
    options = [
        "--model",
        MODEL,
        "--dtype",
        "float32",
        "--transport",
        "shm",
        "--port",
        str(port),
        "--no-restart",
        "--prefill",
        str(request.param),
    ]
    with subprocess.Popen(
        [sys.executable, "-c", command, "up", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **SMALL["*"], "COLUMNS": "200"},
    ) as launcher:
        assert launcher.stdout is not None
        shown = []
        for line in launcher.stdout:
            shown.append(line)
            if "Ctrl-C" in line:
                break
        else:
            pytest.fail("".join(shown))
        try:
            yield launcher, f"http://127.0.0.1:{port}"
        finally:
            launcher.kill()


def family(launcher: "subprocess.Popen[str]", num_prefill: int) -> tuple[list[psutil.Process], set[str]]:
    """What the launcher has started, and the shared memory of these."""
    found = psutil.Process(launcher.pid).children(recursive=True)
    assert len(found) >= 5 + num_prefill  # nats, kvtransfer, decode, gateway, sweeper
    pids = {str(process.pid) for process in found}
    mine = {name for name in segments() if name.removeprefix(SEGMENT_PREFIX).partition("-")[0] in pids}
    assert len(mine) == 1 + num_prefill
    return found, mine


@pytest.mark.parametrize(("up", "number"), [(1, signal.SIGINT), (0, signal.SIGTERM)], indirect=["up"])
def test_up_ends_on_a_signal_and_leaves_nothing(up: tuple[subprocess.Popen[str], str], number: signal.Signals) -> None:
    launcher, url = up
    assert complete(url)
    processes, mine = family(launcher, num_prefill=int(number == signal.SIGINT))
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, output
    assert [process for process in processes if process.is_running()] == []
    assert mine & segments() == set()


PDSERVE = [sys.executable, "-c", "from services.launcher.cli import main; main()"]


def test_a_signal_while_it_starts_ends_it_quietly() -> None:
    launcher = subprocess.Popen(
        [*PDSERVE, "up", "--model", MODEL, "--port", str(free_port())],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert launcher.stdout is not None
    for line in launcher.stdout:  # the first line of a process that it started
        if "nats" in line:
            break
    children = psutil.Process(launcher.pid).children(recursive=True)
    assert children
    launcher.send_signal(signal.SIGINT)
    rest, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert "Traceback" not in rest and "Error" not in rest
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_a_taken_port_is_said_at_once() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        done = subprocess.run(
            [*PDSERVE, "up", "--model", MODEL, "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert f"port {port} is taken" in done.stderr


@pytest.mark.parametrize("option", ["--transport", "--dtype"])
def test_a_wrong_choice_is_refused_by_the_command(option: str) -> None:
    done = subprocess.run([*PDSERVE, "up", option, "rdma"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert option in done.stderr and "rdma" in done.stderr


def test_a_process_that_can_never_start_is_not_started_again() -> None:
    options = {"model": MODEL, "prefill": 0, "dtype": "float32", "env": {"decode": {"PDSERVE_BLOCK_SIZE": "0"}}}
    with pytest.raises(StartError, match=r"(?s)decode-0 ended with 2.*block_size"), Deployment(**options, restart=True):
        pass


@pytest.mark.parametrize("up", [0], indirect=True)
def test_a_killed_up_leaves_nothing(up: tuple[subprocess.Popen[str], str], eventually: Eventually) -> None:
    launcher, _ = up
    processes, mine = family(launcher, num_prefill=0)
    launcher.kill()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
    eventually(lambda: mine & segments() == set(), "shared memory is gone")


def test_model_fetch_prints_the_folder() -> None:
    command = "from services.launcher.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "model", "fetch", MODEL], capture_output=True, text=True, check=True
    )
    assert (Path(done.stdout.strip()) / "config.json").is_file()
