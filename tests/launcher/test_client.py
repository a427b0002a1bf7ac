"""The SSE client against a server of canned bytes."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from services.launcher.client import ApiError, served_model, stream_chat

DELTA = 'data: {"id":"chatcmpl-7","choices":[{"index":0,"delta":{"content":"%s"}}],"usage":null}\n\n'
USAGE = 'data: {"id":"chatcmpl-7","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n'


class Handler(BaseHTTPRequestHandler):
    body = ""
    status = 200

    def do_GET(self) -> None:
        self._answer(self.body if self.path == "/v1/models" else "ok")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer(self.body)

    def _answer(self, body: str) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    handler = type("Canned", (Handler,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", handler
        http.shutdown()
        thread.join()


def test_pieces_arrive_in_order_and_comments_are_skipped(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    handler.body = DELTA % "Pa" + ": ping\n\n" + DELTA % "ris" + USAGE + "data: [DONE]\n\n"
    pieces: list[str] = []
    answer = stream_chat(url, "m", [{"role": "user", "content": "?"}], pieces.append)
    assert pieces == ["Pa", "ris"]
    assert (answer.text, answer.request_id) == ("Paris", "chatcmpl-7")
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (5, 2)
    assert 0 < answer.first_token_s <= answer.total_s


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (DELTA % "Pa", r"without \[DONE\]"),
        (DELTA % "Pa" + 'data: {"error":{"message":"the workers were lost"}}\n\n', "the workers were lost"),
    ],
)
def test_a_broken_stream_is_an_error(server: tuple[str, type[Handler]], body: str, message: str) -> None:
    url, handler = server
    handler.body = body
    with pytest.raises(ApiError, match=message):
        stream_chat(url, "m", [], lambda text: None)


def test_a_refusal_says_status_and_message(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    handler.status, handler.body = 400, '{"error":{"message":"messages: empty"}}'
    with pytest.raises(ApiError, match="400: messages: empty"):
        stream_chat(url, "m", [], lambda text: None)


def test_the_served_model_is_the_first_listed(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    handler.body = '{"data":[{"id":"smollm2-135m"}]}'
    assert served_model(url) == "smollm2-135m"


def test_nobody_listening_is_one_sentence() -> None:
    with pytest.raises(ApiError, match="nothing answers at"):
        served_model("http://127.0.0.1:9")
