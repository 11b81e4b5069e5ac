#!/usr/bin/env python3
"""How many tokens a second `aotllm bench serve` can take on one core, from a server that does nothing.

The server is another process that writes prepared events, each by a system call of its own and in turn over all
connections, as a server does that generates a token for each request per step. Printed are the rate and the CPU time of
the client per token.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_CHUNK = (
    '{"id":"chatcmpl-0123456789abcdef0123456789abcdef","created":1750000000,"model":"m","object":'
    '"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":%s}]%s}'
)


def _event(data: str) -> bytes:
    event = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(event), event)


def _answer(tokens: int) -> Iterator[bytes]:
    plain = _event(_CHUNK % ("null", ""))
    usage = f',"usage":{{"prompt_tokens":8,"completion_tokens":{tokens}}}'
    yield _HEAD + plain
    for _ in range(tokens - 2):
        yield plain
    yield _event(_CHUNK % ('"length"', usage)) + _event("[DONE]") + b"0\r\n\r\n"


def _serve(listener: socket.socket, tokens: int) -> None:
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    answers: dict[socket.socket, Iterator[bytes]] = {}
    while True:
        for key, _ in selector.select(0 if answers else None):
            if key.fileobj is listener:
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(connection, selectors.EVENT_READ)
                continue
            connection = key.fileobj
            try:
                request = connection.recv(1 << 20)
            except ConnectionError:
                request = b""
            if not request:
                selector.unregister(connection)
                connection.close()
                answers.pop(connection, None)
            elif b"/chat/completions" in request:
                answers[connection] = _answer(tokens)
            elif b" HTTP/1.1" in request:
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        for connection, events in list(answers.items()):
            event = next(events, None)
            if event is None:
                del answers[connection]
                continue
            try:
                connection.sendall(event)
            except OSError:
                del answers[connection]


def main() -> None:
    """Print a line per concurrency."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,16,64,256")
    parser.add_argument("--tokens", type=int, default=500, help="per answer")
    parser.add_argument("--requests", type=int, default=512)
    arguments = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = multiprocessing.get_context("fork").Process(target=_serve, args=(listener, arguments.tokens), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    print(f"{'concurrency':>11} {'tokens/s':>10} {'CPU us/token':>13} {'CPU':>6}   on {os.cpu_count()} cores")
    for concurrency in arguments.concurrency.split(","):
        command = [sys.executable, "-m", "aotllm", "bench", "serve", "--url", url, "--model", "m", "--json", "-"]
        command += ["--concurrency", concurrency, "--num-prompts", str(arguments.requests), "--no-detailed"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = json.loads(done.stdout)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        tokens, seconds = result["total_output_tokens"], result["duration"]
        print(f"{concurrency:>11} {tokens / seconds:10.0f} {cpu / tokens * 1e6:13.2f} {cpu / seconds:6.0%}")
    server.terminate()


if __name__ == "__main__":
    main()
