"""The official client with tools, reasoning and parsed answers, against a real server on a fake manager."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import openai
import pydantic
import pytest

from aotllm import Executor
from aotllm.manager import ManagerRequest
from tests.aotllm.fake_manager import FakeManager
from tests.aotllm.grammar_oracle import accepts
from tests.aotllm.serving.http_server import serving
from tests.aotllm.tool_templates import THINKING, TemplateEngine

CALLS = [
    ("GetWeather", '{"place": {"city": "Rom"}, "unit": "c"}'),
    ("GetWeather", '{"place": {"city": "Oslo"}, "unit": "f"}'),
]
AUTO = "<think>Both.</think>\nOne moment.\n" + "\n".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in CALLS
)
REQUIRED = "[" + ", ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in CALLS) + "]"


class Place(pydantic.BaseModel):
    city: str


class Unit(str, Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


class GetWeather(pydantic.BaseModel):
    """The weather of a place."""

    place: Place
    unit: Unit


TOOL = openai.pydantic_function_tool(GetWeather)
HI: Any = [{"role": "user", "content": "Rome and Oslo?"}]


def answer(request: ManagerRequest) -> bytes:
    """As a model would that keeps to its grammar."""
    if request.constraint is None:
        return AUTO.encode()
    texts = [REQUIRED, CALLS[0][1], '{"city": "Rom"}']
    return next(text for text in texts if accepts(request.constraint, text)).encode()


@pytest.fixture
def url(start: Callable[..., Executor]) -> Iterator[str]:
    executor = start(FakeManager(answer), TemplateEngine(THINKING))
    with serving({"m": executor}) as url:
        yield url


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def test_auto(client: openai.OpenAI):
    choice = client.chat.completions.create(model="m", messages=HI, tools=[TOOL]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "One moment."
    assert choice.message.reasoning_content == choice.message.reasoning == "Both."
    assert calls_of(choice.message) == CALLS


def test_a_conversation_with_the_clients_own_messages(client: openai.OpenAI):
    message = client.chat.completions.create(model="m", messages=HI, tools=[TOOL]).choices[0].message
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "22"} for call in message.tool_calls or []]
    more: Any = [*HI, message.model_dump(), *results]
    assert client.chat.completions.create(model="m", messages=more, tools=[TOOL]).choices[0].message.tool_calls


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "GetWeather"}}])
def test_the_streaming_helper(client: openai.OpenAI, choice: Any):
    expected = CALLS if isinstance(choice, str) else CALLS[:1]
    done = []
    with client.chat.completions.stream(model="m", messages=HI, tools=[TOOL], tool_choice=choice) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.done":
                done.append((event.name, event.arguments))
                assert isinstance(event.parsed_arguments, GetWeather)
        completion = stream.get_final_completion()
    assert done == expected
    assert calls_of(completion.choices[0].message) == expected
    assert completion.choices[0].finish_reason == ("tool_calls" if isinstance(choice, str) else "stop")


def test_parse_gives_arguments_as_objects(client: openai.OpenAI):
    completion = client.chat.completions.parse(model="m", messages=HI, tools=[TOOL], tool_choice="required")
    calls = completion.choices[0].message.tool_calls or []
    assert [call.function.parsed_arguments for call in calls] == [GetWeather.model_validate_json(a) for _, a in CALLS]


def test_parse_gives_the_answer_as_an_object(client: openai.OpenAI):
    completion = client.chat.completions.parse(model="m", messages=HI, response_format=Place)
    assert completion.choices[0].message.parsed == Place(city="Rom")


def test_parse_with_tools_and_a_form(client: openai.OpenAI):
    completion = client.chat.completions.parse(model="m", messages=HI, tools=[TOOL], response_format=Place)
    assert completion.choices[0].message.parsed == Place(city="Rom")
    assert not completion.choices[0].message.tool_calls


def test_async(url: str):
    async def run() -> tuple[Any, Any]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            whole = await client.chat.completions.create(model="m", messages=HI, tools=[TOOL])
            async with client.chat.completions.stream(model="m", messages=HI, tools=[TOOL]) as stream:
                async for _ in stream:
                    pass
                return whole.choices[0].message, (await stream.get_final_completion()).choices[0].message

    whole, streamed = asyncio.run(run())
    assert calls_of(whole) == calls_of(streamed) == CALLS
    assert whole.content == streamed.content


def test_errors_are_the_clients_own(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=HI, tool_choice="required")
    assert caught.value.param == "tool_choice"


def test_langchain_binds_tools(url: str):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(base_url=url, api_key="none", model="m", max_retries=0)
    message = model.bind_tools([GetWeather], tool_choice="required").invoke("Rome and Oslo?")
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [(n, json.loads(a)) for n, a in CALLS]
    assert model.with_structured_output(GetWeather).invoke("Rome?") == GetWeather.model_validate_json(CALLS[0][1])
