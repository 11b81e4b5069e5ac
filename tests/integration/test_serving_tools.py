"""Tools with a real model that was never taught any: forced calls are valid, and told to the model in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from aotllm import Executor
from aotllm.engines import Engine
from tests.aotllm.serving.http_server import serving


class Place(pydantic.BaseModel):
    city: Literal["Paris", "Rome", "Oslo"]


class GetWeather(pydantic.BaseModel):
    """The weather of a city."""

    place: Place
    days: int = pydantic.Field(ge=1, le=9)


TOOLS: Any = [
    openai.pydantic_function_tool(GetWeather, name="get_weather"),
    {"type": "function", "function": {"name": "get_time", "description": "The time now"}},
]
SCHEMAS = {
    "get_weather": TOOLS[0]["function"]["parameters"],
    "get_time": {"type": "object", "additionalProperties": False},
}
MESSAGES: Any = [{"role": "user", "content": "What will the weather be in Paris over the next 3 days?"}]


@pytest.fixture(scope="module")
def client(smollm2: Engine) -> Iterator[openai.OpenAI]:
    with Executor(smollm2, num_threads=2) as executor, serving({"m": executor}) as url:
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def check(calls: Any) -> None:
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_required(client: openai.OpenAI, temperature: float) -> None:
    options: Any = {"temperature": temperature, "seed": 5, "max_tokens": 400, "parallel_tool_calls": False}
    choice = client.chat.completions.create(
        model="m", messages=MESSAGES, tools=TOOLS, tool_choice="required", **options
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    check(choice.message.tool_calls)


def test_a_named_function_and_its_stream(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    options: Any = {"temperature": 0, "max_tokens": 400, "tools": TOOLS, "tool_choice": choice}
    whole = client.chat.completions.create(model="m", messages=MESSAGES, **options).choices[0]
    check(whole.message.tool_calls)
    assert whole.finish_reason == "stop"
    with client.chat.completions.stream(model="m", messages=MESSAGES, **options) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert whole.message.tool_calls is not None
    assert streamed.message.tool_calls is not None
    ((one,), (other,)) = whole.message.tool_calls, streamed.message.tool_calls
    assert one.function.arguments == other.function.arguments
    arguments = GetWeather.model_validate_json(one.function.arguments)
    assert arguments.place.city == "Paris"  # the model sees the question


def test_free_answers_are_the_same_whole_and_streamed(client: openai.OpenAI) -> None:
    options: Any = {"model": "m", "messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 60}
    whole = client.chat.completions.create(**options).choices[0]
    content, calls, reason = "", [], None
    for chunk in client.chat.completions.create(**options, stream=True):
        content += chunk.choices[0].delta.content or ""
        for call in chunk.choices[0].delta.tool_calls or []:
            calls += [[call.function.name, ""]] if call.id else []
            calls[-1][1] += call.function.arguments
        reason = chunk.choices[0].finish_reason
    assert (content, reason) == (whole.message.content or "", whole.finish_reason)
    assert calls == [[call.function.name, call.function.arguments] for call in whole.message.tool_calls or []]


def test_a_message_is_continued(client: openai.OpenAI) -> None:
    begun: Any = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    extra = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
    answer = client.chat.completions.create(model="m", messages=begun, temperature=0, max_tokens=8, extra_body=extra)
    assert (answer.choices[0].message.content or "").startswith("The capital of France is Paris")
