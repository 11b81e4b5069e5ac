"""What stands on the wire, to the byte. Ids and times are made equal, everything else is as it is sent.

The server is stepped by hand: one token per event. Tokens that wait would share one, which another test looks at.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from aotllm.errors import Internal, Overloaded
from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.serving.http_client import Ask

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]

CHUNK = 'data: {"id":"ID","created":0,"model":"m","object":"chat.completion.chunk","choices":['
PIECE = 'data: {"id":"ID","object":"text_completion","created":0,"model":"m","choices":['
DONE = "data: [DONE]\n\n"


def normalised(text: str) -> str:
    text = re.sub(r'"(chatcmpl-|cmpl-|resp_|msg_)[0-9a-f]{32}"', '"ID"', text)
    return re.sub(r'"(created|created_at|completed_at)":[0-9]+', r'"\1":0', text)


def transcript(ask: Ask, path: str, body: dict[str, Any], manager: FakeManager | None = None) -> str:
    manager = manager or FakeManager(says("hé"), stepping="by hand")
    return normalised(ask(manager).post_in_steps(manager, path, {"model": "m", "stream": True, **body}).text)


def test_chat(ask: Ask):
    assert transcript(ask, CHAT, {"messages": HI}) == (
        CHUNK + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHUNK + '{"index":0,"delta":{"content":"h"},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHUNK + '{"index":0,"delta":{"content":"é"},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHUNK + '{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}\n\n'
        + DONE
    )  # fmt: skip


def test_chat_with_usage_at_the_end(ask: Ask):
    body = {"messages": HI, "max_tokens": 1, "stream_options": {"include_usage": True}}
    assert transcript(ask, CHAT, body) == (
        CHUNK + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHUNK + '{"index":0,"delta":{"content":"h"},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHUNK + '{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"length","stop_reason":null}]}\n\n'
        + CHUNK + '],"usage":{"prompt_tokens":21,"total_tokens":22,"completion_tokens":1,'
        '"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
        + DONE
    )  # fmt: skip


def test_chat_with_usage_all_along(ask: Ask):
    def usage(count: int) -> str:
        return (
            f'],"usage":{{"prompt_tokens":21,"total_tokens":{21 + count},"completion_tokens":{count},'
            '"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
        )

    body = {"messages": HI, "max_tokens": 3, "stream_options": {"continuous_usage_stats": True}}
    assert transcript(ask, CHAT, body, FakeManager(says("abc"), stepping="by hand")) == (
        CHUNK + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' + usage(1)
        + CHUNK + '{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null}' + usage(1)
        + CHUNK + '{"index":0,"delta":{"content":"b"},"logprobs":null,"finish_reason":null}' + usage(2)
        + CHUNK + '{"index":0,"delta":{"content":"c"},"logprobs":null,"finish_reason":null}' + usage(3)
        + CHUNK + '{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"length","stop_reason":null}'
        + usage(3) + DONE
    )  # fmt: skip


def test_chat_with_two_choices(ask: Ask):
    manager = FakeManager(nth_answer=lambda _, index: b"ab"[index : index + 1], stepping="by hand")

    def chunks(n: int) -> list[str]:
        start = f'{CHUNK}{{"index":{n},"delta":'
        return [
            start + '{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n',
            start + f'{{"content":"{"ab"[n]}"}},"logprobs":null,"finish_reason":null}}]}}\n\n',
            start + '{"content":""},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}\n\n',
        ]

    first, second = chunks(0), chunks(1)
    expected = "".join([*first[:2], *second[:2], first[2], second[2], DONE])
    assert transcript(ask, CHAT, {"messages": HI, "n": 2}, manager) == expected


def test_chat_with_logprobs_and_a_stop_string(ask: Ask):
    manager = FakeManager(says("a."), stepping="by hand")
    body = {"messages": HI, "logprobs": True, "top_logprobs": 1, "stop": "."}
    a = '{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[{"token":"a","logprob":-0.5,"bytes":[97]}]}'
    dot = '{"token":".","logprob":-0.5,"bytes":[46],"top_logprobs":[{"token":".","logprob":-0.5,"bytes":[46]}]}'
    assert transcript(ask, CHAT, body, manager) == (
        CHUNK + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHUNK + f'{{"index":0,"delta":{{"content":"a"}},"logprobs":{{"content":[{a}]}},"finish_reason":null}}]}}\n\n'
        + CHUNK + f'{{"index":0,"delta":{{"content":""}},"logprobs":{{"content":[{dot}]}},"finish_reason":null}}]}}\n\n'
        + CHUNK + '{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"stop","stop_reason":"."}]}\n\n'
        + DONE
    )  # fmt: skip


def test_completions(ask: Ask):
    body = {"prompt": "x", "echo": True, "stream_options": {"include_usage": True}}
    assert transcript(ask, TEXT, body) == (
        PIECE + '{"index":0,"text":"xh","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
        + PIECE + '{"index":0,"text":"é","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
        + PIECE + '{"index":0,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":null}]}\n\n'
        + PIECE + '],"usage":{"prompt_tokens":2,"total_tokens":6,"completion_tokens":4,'
        '"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
        + DONE
    )  # fmt: skip


def test_completions_with_logprobs_and_token_ids(ask: Ask):
    def choice(text: str, token: int, offset: int, end: str) -> str:
        return (
            f'{PIECE}{{"index":0,"text":"{text}","logprobs":{{"text_offset":[{offset}],"token_logprobs":[-0.5],'
            f'"tokens":["token_id:{token}"],"top_logprobs":[{{"token_id:{token}":-0.5}}]}},{end}}}]}}\n\n'
        )

    ids = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    manager = FakeManager(says("ab"), stepping="by hand")
    assert transcript(ask, TEXT, {"prompt": [120], "logprobs": 1, "max_tokens": 2, **ids}, manager) == (
        choice("a", 97, 0, '"finish_reason":null,"stop_reason":null,"token_ids":[97],"prompt_token_ids":[120]')
        + choice("b", 98, 1, '"finish_reason":"length","stop_reason":null,"token_ids":[98],"prompt_token_ids":null')
        + DONE
    )


@pytest.mark.parametrize(
    ("error", "body"),
    [
        (Internal("KV pool lost"), '{"message":"KV pool lost","type":"InternalServerError","param":null,"code":500}'),
        (Overloaded("full"), '{"message":"full","type":"ServiceUnavailableError","param":null,"code":503}'),
    ],
)
def test_an_error_after_the_first_byte(ask: Ask, error: Exception, body: str):
    manager = FakeManager(lambda _: [ord("a"), error], stepping="by hand")
    assert transcript(ask, CHAT, {"messages": HI}, manager) == (
        CHUNK + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHUNK + '{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null}]}\n\n'
        + f'data: {{"error":{body}}}\n\n'
        + DONE
    )  # fmt: skip


HEAD = (
    '"id":"ID","object":"response","created_at":0,"model":"m","background":false,"instructions":null,'
    '"max_output_tokens":null,"metadata":{},"parallel_tool_calls":true,"previous_response_id":null,'
    '"reasoning":{"effort":null,"summary":null},"service_tier":"default","store":true,"temperature":1.0,'
    '"text":{"format":{"type":"text"}},"tool_choice":"auto","tools":[],"top_logprobs":0,"top_p":1.0,'
    '"truncation":"disabled","user":null'
)


def test_responses(ask: Ask):
    def sent(kind: str, number: int, rest: str) -> str:
        return f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{number},{rest}}}\n\n'

    nothing = '"completed_at":null,"output":[],"usage":null,"error":null,"incomplete_details":null'
    begun = f'"response":{{{HEAD},"status":"in_progress",{nothing}}}'
    place = '"item_id":"ID","output_index":0,"content_index":0'
    empty = '{"type":"output_text","text":"","annotations":[],"logprobs":[]}'
    part = '{"type":"output_text","text":"hé","annotations":[],"logprobs":[]}'
    item = f'{{"id":"ID","type":"message","role":"assistant","status":"completed","content":[{part}]}}'
    usage = (
        '{"input_tokens":21,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":0},"output_tokens":4,'
        '"output_tokens_details":{"reasoning_tokens":0},"total_tokens":25}'
    )
    ended = f'"status":"completed","completed_at":0,"output":[{item}],"usage":{usage}'
    ended += ',"error":null,"incomplete_details":null'
    new = '{"id":"ID","type":"message","role":"assistant","status":"in_progress","content":[]}'
    assert transcript(ask, RESPONSES, {"input": "hi"}) == (
        sent("response.created", 0, begun)
        + sent("response.in_progress", 1, begun)
        + sent("response.output_item.added", 2, f'"output_index":0,"item":{new}')
        + sent("response.content_part.added", 3, f'{place},"part":{empty}')
        + sent("response.output_text.delta", 4, f'{place},"delta":"h","logprobs":[]')
        + sent("response.output_text.delta", 5, f'{place},"delta":"é","logprobs":[]')
        + sent("response.output_text.done", 6, f'{place},"text":"hé","logprobs":[]')
        + sent("response.content_part.done", 7, f'{place},"part":{part}')
        + sent("response.output_item.done", 8, f'"output_index":0,"item":{item}')
        + sent("response.completed", 9, f'"response":{{{HEAD},{ended}}}')
    )  # fmt: skip


def test_tokens_that_wait_share_an_event_and_the_first_one_does_not_wait(ask: Ask):
    manager = FakeManager(says("abcdef"), tokens_per_step=1, stepping="by hand")

    def step_thrice() -> None:
        with manager.changed:
            if manager.running:
                manager.step(1 if len(manager._running[1, 0].output) == 0 else 3)
            manager.changed.wait_for(lambda: manager._polling and not manager._ready, timeout=60)

    manager.step_and_wait = step_thrice
    pieces = re.findall(r'"content":"(\w+)"', transcript(ask, CHAT, {"messages": HI}, manager))
    assert pieces == ["a", "bcd", "ef"]
