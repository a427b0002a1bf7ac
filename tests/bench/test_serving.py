"""`python -m bench.serving` as it is called, against a scripted server."""

import json
import sys

import pytest

from bench import serving
from bench.load.metrics import METRICS
from tests.bench.fake_server import answer, fake_server

# what a reader of `vllm bench serve --save-result --save-detailed` files expects to find
VLLM_FIELDS = """
    date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency
    duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput
    output_throughput total_token_throughput input_lens output_lens ttfts itls start_times generated_texts errors
    max_output_tokens_per_s max_concurrent_requests
""".split()  # noqa: SIM905 (to be read)


def call(monkeypatch, *flags: str) -> None:
    """Flags with a brace in them are one word, others are split."""
    words = [word for each in flags for word in ([each] if "{" in each else each.split())]
    monkeypatch.setattr(sys, "argv", ["bench.serving", *words])
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    serving.main()


def test_a_whole_run(monkeypatch, tmp_path, capsys):
    with fake_server(lambda n, body: answer(0.01, 0.001, body["max_tokens"], len(body["prompt"]))) as server:
        call(
            monkeypatch,
            f"--base-url {server.url} --num-prompts 12 --request-rate 100 --random-input-len 20",
            "--random-output-len 4 --random-prefix-len 5 --num-warmups 2 --goodput ttft:60000 tpot:60000",
            "--metric-percentiles 50,99.5 --save-result --save-detailed --result-filename r.json",
            f"--result-dir {tmp_path}/new --header x-a=b=c --metadata gpus=0 --seed 3",
            "--extra-body",
            '{"temperature": 0}',
        )
    result = json.loads((tmp_path / "new" / "r.json").read_text())
    assert set(VLLM_FIELDS) <= set(result)
    for metric in METRICS:
        assert {f"{end}_{metric}_ms" for end in ("mean", "median", "std", "p50", "p99.5")} <= set(result)
    assert (result["completed"], result["failed"], result["model_id"]) == (12, 0, "fake")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (12 * 25, 12 * 4)
    assert result["request_goodput"] == result["request_throughput"] == pytest.approx(12 / result["duration"])
    assert (result["request_rate"], result["max_concurrency"], result["backend"]) == (100, None, "openai")
    assert (result["latency_origin"], result["prompts_are"], result["gpus"]) == ("due", "token ids", "0")
    assert len(server.bodies) == 2 + 12
    assert all("\r\nx-a: b=c\r\n" in head for head in server.heads)
    for body in server.bodies:
        assert body["ignore_eos"] is True
        assert body["temperature"] == 0
        assert body["max_tokens"] == 4
        assert body["prompt"][:5] == server.bodies[0]["prompt"][:5]
        assert all(125 <= each < 1000 for each in body["prompt"])  # the largest vocabulary that it took is 1000
    told = capsys.readouterr().out
    assert "12 / 0" in told
    assert told.strip().splitlines()[-1].startswith("12 of 12 completed, ")


def test_the_seed_decides_what_is_sent(monkeypatch):
    sent = []
    for seed in ("1", "1", "2"):
        with fake_server(lambda n, body: answer(0.0, 0.0, 1)) as server:
            flags = f"--base-url {server.url} --num-prompts 5 --max-concurrency 1 --random-range-ratio 0.5"
            call(monkeypatch, flags, f"--seed {seed}")
            sent.append(server.bodies)
    assert sent[0] == sent[1]
    assert sent[0] != sent[2]


def test_closed_loop_of_chat_in_words(monkeypatch, tmp_path):
    with fake_server(lambda n, body: answer(0.0, 0.0, 2)) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        call(
            monkeypatch,
            f"--host {host} --port {port} --endpoint /v1/chat/completions --num-prompts 6 --model m",
            f"--max-concurrency 2 --random-input-len 3 --no-ignore-eos --save-result --result-dir {tmp_path}",
        )
        assert server.most_active <= 2
    (path,) = tmp_path.iterdir()
    result = json.loads(path.read_text())
    assert path.name == f"openai-chat-infqps-concurrency2-m-{result['date']}.json"
    assert (result["request_rate"], result["latency_origin"], result["prompts_are"]) == ("inf", "sent", "words")
    assert not {"ttfts", "itls", "errors", "generated_texts"} & set(result)  # only with --save-detailed
    assert "ignore_eos" not in server.bodies[0]
    assert len(server.bodies[0]["messages"][0]["content"].split()) == 3


def test_text_where_token_ids_are_refused(monkeypatch):
    with fake_server(lambda n, body: answer(0.0, 0.0, 1), vocabulary=0) as server:
        call(monkeypatch, f"--base-url {server.url} --num-prompts 1 --random-input-len 6")
    assert len(server.bodies[0]["prompt"].split()) == 6


def test_failures_are_told_and_a_run_without_success_ends_with_1(monkeypatch, capsys):
    with (
        fake_server(lambda n, body: (503, b'{"error":{"message":"busy"}}')) as server,
        pytest.raises(SystemExit) as end,
    ):
        call(monkeypatch, f"--base-url {server.url} --num-prompts 3")
    assert end.value.code == 1
    assert "3 failed: 503: busy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--goodput itl:5", "--goodput wants"),
        ("--percentile-metrics ttft,speed", "unknown speed"),
        ("--metric-percentiles 101", "between 0 and 100"),
        ("--header nonsense", "--header wants"),
        ("--random-range-ratio 1.5 --model m --endpoint /v1/chat/completions", "ratio"),
        ("--base-url http://127.0.0.1:1", "/v1/models"),
    ],
)
def test_what_cannot_run_ends_with_2(monkeypatch, capsys, flags, said):
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, flags)
    assert end.value.code == 2
    assert said in capsys.readouterr().err
