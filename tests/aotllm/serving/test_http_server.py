"""A real server on loopback: the official client, clients that leave, SIGTERM."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from pydantic import BaseModel

from aotllm import Executor
from aotllm.errors import AotllmError
from aotllm.serving.sockets import listen
from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.serving.http_server import serving

Serve = Callable[..., str]
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def serve(start: Callable[..., Executor]) -> Iterator[Serve]:
    """Serves one model, "m", in a thread; returns the base URL."""
    with ExitStack() as servers:
        yield lambda manager: servers.enter_context(serving({"m": start(manager)}, api_key=["key"])).removesuffix("/v1")


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=60)


def endless(request: object) -> Iterator[int]:
    return itertools.cycle(b"x")


def test_the_official_client_chats(serve: Serve):
    client = client_of(serve(FakeManager(says("Grüße, 🌊!"))))
    answer = client.chat.completions.create(model="m", messages=HI)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Grüße, 🌊!", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("Grüße, 🌊!".encode()) + 1


def test_the_official_client_streams(serve: Serve):
    client = client_of(serve(FakeManager(says("Grüße, 🌊!"))))
    stream = client.chat.completions.create(
        model="m", messages=HI, stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=1
    )
    chunks = list(stream)
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.delta.content or "" for choice in choices) == "Grüße, 🌊!"
    assert not any("\ufffd" in (choice.delta.content or "") for choice in choices)
    assert choices[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens > 0
    # OpenAI's helper that puts a stream together again takes it, too.
    with client.chat.completions.stream(model="m", messages=HI) as helper:
        assert helper.get_final_completion().choices[0].message.content == "Grüße, 🌊!"


def test_the_official_client_completes(serve: Serve):
    client = client_of(serve(FakeManager(says("sea"))))
    assert client.completions.create(model="m", prompt="a", logprobs=1).choices[0].text == "sea"
    assert "".join(c.choices[0].text for c in client.completions.create(model="m", prompt="a", stream=True)) == "sea"
    assert [model.id for model in client.models.list()] == ["m"]


class Place(BaseModel):
    a: int


def test_the_official_client_gets_responses(serve: Serve):
    manager = FakeManager(says('{"a":1}'))
    client = client_of(serve(manager))
    response = client.responses.create(model="m", input="hi", instructions="be brief")
    assert (response.output_text, response.status) == ('{"a":1}', "completed")
    assert client.responses.retrieve(response.id).output_text == response.output_text
    deltas = [e.delta for e in client.responses.create(model="m", input="hi", stream=True) if "delta" in e.type]
    assert "".join(deltas) == '{"a":1}'
    with client.responses.stream(model="m", input="hi", previous_response_id=response.id) as stream:
        assert "".join(e.delta for e in stream if e.type == "response.output_text.delta") == '{"a":1}'
        assert stream.get_final_response().output_text == '{"a":1}'
    parsed = client.responses.parse(model="m", input="hi", text_format=Place)
    assert parsed.output_parsed == Place(a=1)
    assert manager.submitted[-1].constraint is not None
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match="not kept"):
        client.responses.create(model="m", input="hi", previous_response_id=response.id)


def test_the_official_client_raises_its_own_errors(serve: Serve):
    url = serve(FakeManager(endless, stepping="by hand", max_queue_size=1))
    client = client_of(url)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="m", messages=HI, temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "BadRequestError")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HI)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.InternalServerError) as overloaded:
        client.completions.create(model="m", prompt=["a", "b"])
    assert overloaded.value.status_code == 503
    assert overloaded.value.response.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("options", "first_token"),
    [
        ({"n": 2}, False),
        ({"n": 2}, True),
        ({"n": 2, "stream": True}, False),
        ({"n": 2, "stream": True}, True),
        ({"use_beam_search": True}, False),  # after a token it has other requests
    ],
    ids=str,
)
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_leaves_frees_its_requests(
    serve: Serve, options: dict[str, object], first_token: bool, prompts: int
):
    manager = FakeManager(endless, stepping="by hand")
    address = urlsplit(serve(manager))
    body = httpx.Request("POST", "http://x", json={"prompt": ["a"] * prompts, **options}).read()
    with closing(socket.create_connection((address.hostname, address.port))) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\nContent-Length: {len(body)}\r\n"
        )
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        manager.wait_until(lambda m: len(m.running) == prompts)
        if first_token:
            manager.step()
            if "stream" in options:
                assert connection.recv(12) == b"HTTP/1.1 200"
    manager.wait_until(lambda m: not m.running)
    assert sorted(set(manager.cancelled)) == list(range(1, prompts + 1))


def test_an_address_in_use_is_one_sentence(serve: Serve):
    port = urlsplit(serve(FakeManager(says("ok")))).port
    with pytest.raises(AotllmError, match=f"cannot listen on 127.0.0.1:{port}"):
        listen("127.0.0.1", port or 0)


SERVER = """
import sys, threading
from aotllm import Executor
from aotllm.serving import context_of, run_server
from tests.aotllm.fake_manager import FakeEngine, FakeManager, says

manager = FakeManager(says("sea"), stepping="by hand")
def step_on_each_line():
    for line in sys.stdin:
        manager.step()
threading.Thread(target=step_on_each_line, daemon=True).start()
with Executor(FakeEngine(), manager_factory=lambda *_: manager) as executor:
    run_server(context_of({"m": executor}), "127.0.0.1", 0, 60, lambda a: print(f"http://{a['http']}", flush=True))
print("shut down", manager.shutdowns, flush=True)
"""


def test_sigterm_lets_requests_in_flight_finish():
    program = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdin is not None
    assert program.stdout is not None
    url = program.stdout.readline().strip()

    def step() -> None:
        program.stdin.write("\n")  # type: ignore[union-attr]
        program.stdin.flush()  # type: ignore[union-attr]

    try:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True}, timeout=60
        ) as response:
            step()
            lines = response.iter_lines()
            text = next(lines)
            program.send_signal(signal.SIGTERM)
            _wait_until_refused(url)
            for _ in range(3):
                step()
            text += "".join(lines)
        output, errors = program.communicate(timeout=60)
    finally:
        program.kill()
    # Tokens that wait share an event, so how many there are depends on who is faster.
    pieces = [json.loads(part)["choices"][0] for part in text.removesuffix("data: [DONE]").split("data: ")[1:]]
    assert "".join(piece["text"] for piece in pieces) == "sea"
    assert pieces[-1]["finish_reason"] == "stop"
    assert text.endswith("data: [DONE]")
    assert (program.returncode, output, errors) == (0, "shut down [False]\n", "")


def _wait_until_refused(url: str) -> None:
    address = urlsplit(url)
    while True:
        try:
            socket.create_connection((address.hostname, address.port)).close()
        except ConnectionError:
            return
