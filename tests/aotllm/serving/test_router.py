"""`Router` and `LazyRoutes`: what handlers get, and when routes are made."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from aotllm.serving.error_responses import ERROR_HANDLERS
from aotllm.serving.openapi import openapi_document
from aotllm.serving.router import LazyRoutes, Query, Router


class Body(BaseModel):
    """What a handler takes."""

    word: str
    times: int = 1


def routes() -> Router:
    router = Router()

    @router.post("/things/{name}/say", body=f"{__name__}:Body")
    async def say(body: Body, name: str) -> dict[str, Any]:
        return {"said": [body.word] * body.times, "by": name}

    @router.get("/things/{path:path}", queries=(Query("since", float, 0.5), Query("mark", str, None)))
    async def show(client: Request, path: str, since: float, mark: str | None) -> dict[str, Any]:
        return {"path": path, "since": since, "mark": mark, "method": client.method}

    @router.route("/things", ("GET", "DELETE"))
    async def plain() -> Response:
        return PlainTextResponse("things")

    return router


class App:
    def __init__(self) -> None:
        self.made = 0
        self.group = LazyRoutes(("/things",), self._make)
        self._app = Starlette(routes=[self.group], exception_handlers=ERROR_HANDLERS)  # type: ignore[arg-type]

    def _make(self) -> Router:
        self.made += 1
        return routes()

    def __call__(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(call())


def test_routes_are_made_once_and_only_when_they_are_asked_for():
    app = App()
    assert app("GET", "/other").status_code == 404
    assert app.made == 0
    assert app("GET", "/things").text == "things"
    assert app("GET", "/things/a").status_code == 200
    assert app.made == 1


@pytest.mark.parametrize(
    ("method", "path", "json", "answer"),
    [
        ("POST", "/things/a/say", {"word": "x", "times": 2}, {"said": ["x", "x"], "by": "a"}),
        ("GET", "/things/a/b", None, {"path": "a/b", "since": 0.5, "mark": None, "method": "GET"}),
        ("GET", "/things/a?since=2&mark=", None, {"path": "a", "since": 2.0, "mark": "", "method": "GET"}),
    ],
)
def test_a_handler_gets_what_it_names(method: str, path: str, json: Any, answer: Any):
    response = App()(method, path, json=json)
    assert (response.status_code, response.json()) == (200, answer)


@pytest.mark.parametrize(
    ("method", "path", "json", "status", "param"),
    [
        ("POST", "/things/a/say", {}, 400, "word"),
        ("POST", "/things/a/say", {"word": "x", "times": "many"}, 400, "times"),
        ("POST", "/things/a/say", ["word"], 400, None),
        ("POST", "/things/a/say", None, 400, None),
        ("GET", "/things/a?since=yesterday", None, 400, "since"),
        ("POST", "/things", None, 405, None),
        ("HEAD", "/things", None, 405, None),
        ("GET", "/thin", None, 404, None),
    ],
)
def test_what_is_wrong_is_told_in_our_form(method: str, path: str, json: Any, status: int, param: str | None):
    response = App()(method, path, json=json)
    assert response.status_code == status
    if method != "HEAD":
        error = response.json()["error"]
        assert (error["code"], error["param"]) == (status, param)


def test_the_document_has_paths_parameters_and_bodies():
    document = openapi_document(App().group.routes)
    assert {path: sorted(operations) for path, operations in document["paths"].items()} == {
        "/things/{name}/say": ["post"],
        "/things/{path}": ["get"],
        "/things": ["delete", "get"],
    }
    say, show = document["paths"]["/things/{name}/say"]["post"], document["paths"]["/things/{path}"]["get"]
    assert say["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Body"}
    assert document["components"]["schemas"]["Body"]["required"] == ["word"]
    assert [(p["name"], p["in"], p["schema"]["type"]) for p in show["parameters"]] == [
        ("path", "path", "string"),
        ("since", "query", "number"),
        ("mark", "query", "string"),
    ]
    ids = [operation["operationId"] for operations in document["paths"].values() for operation in operations.values()]
    assert len(ids) == len(set(ids))
