"""`Router`: routes whose handlers get what they name: the body, the client's request, parameters of path and query.

A server has fifty routes, and most of them are never asked for. So what a route needs is imported, and the schema of
its body is made, by the first request for it: `LazyRoutes` makes a group of routes, `body` names a schema.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from aotllm.errors import InvalidRequest

if TYPE_CHECKING:
    from pydantic import BaseModel

Handler = Callable[..., Awaitable[Any]]
Call = Callable[[Request], Awaitable[Response]]

_NO_OBJECT = "the body must be a JSON object, sent as Content-Type: application/json"


def imported(name: str) -> Any:
    """What `module:name` says, imported now."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class Query:
    """A parameter of the query, optional."""

    name: str
    kind: type
    """str or float"""
    default: Any
    doc: str = ""

    def value(self, request: Request) -> Any:
        """Of a request. Raises InvalidRequest."""
        text = request.query_params.get(self.name)
        if text is None:
            return self.default
        try:
            return self.kind(text)
        except ValueError:
            raise InvalidRequest(f"{self.name} must be a number, got {text!r:.60}", self.name) from None


class Endpoint(Route):
    """One path of a `Router`.

    Args:
        path: as Starlette has it, `{name}` and `{name:path}` being parameters.
        handler: a coroutine function; see `Router.route`.
        methods: of HTTP.
        body: `module:name` of a pydantic model, or None.
        queries: parameters of the query.
        wrap: around the call of the handler, for errors of another form.
        in_schema: whether the OpenAPI document has it.
    """

    def __init__(
        self,
        path: str,
        handler: Handler,
        methods: Sequence[str],
        *,
        body: str | None = None,
        queries: Sequence[Query] = (),
        wrap: Callable[[Call], Call] = lambda call: call,
        in_schema: bool = True,
    ) -> None:
        names = inspect.signature(handler).parameters

        async def call(request: Request) -> Response:
            arguments = dict(request.path_params)
            if body is not None:
                arguments["body"] = await _read_body(request, self.body_model())
            if "client" in names:
                arguments["client"] = request
            for query in queries:
                arguments[query.name] = query.value(request)
            result = await handler(**arguments)
            return result if isinstance(result, Response) else JSONResponse(result)

        super().__init__(path, wrap(call), methods=methods, name=handler.__name__, include_in_schema=in_schema)
        self.methods = set(methods)  # without the HEAD that Starlette adds
        self.queries = queries
        self._body = body

    def body_model(self) -> type[BaseModel]:
        """The schema of the body. Only for an endpoint that takes one."""
        assert self._body is not None
        model: type[BaseModel] = imported(self._body)
        return model

    @property
    def has_body(self) -> bool:
        """It takes one."""
        return self._body is not None

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See Starlette's `BaseRoute`."""
        match, child = super().matches(scope)
        return match, {**child, "route": self}


class Router:
    """Collects endpoints.

    Args:
        wrap, in_schema: of its endpoints.
    """

    def __init__(self, *, wrap: Callable[[Call], Call] = lambda call: call, in_schema: bool = True) -> None:
        self.routes: list[Endpoint] = []
        self._wrap, self._in_schema = wrap, in_schema

    def route(
        self, path: str, methods: Sequence[str], *, body: str | None = None, queries: Sequence[Query] = ()
    ) -> Callable[[Handler], Handler]:
        """Decorator of a handler. It gets `body`, the parameters of path and query by their names, and `client`, the
        request itself, if it has such a parameter; it returns a response, or a value to be sent as JSON."""

        def add(handler: Handler) -> Handler:
            self.routes.append(
                Endpoint(
                    path,
                    handler,
                    methods,
                    body=body,
                    queries=queries,
                    wrap=self._wrap,
                    in_schema=self._in_schema,
                )
            )
            return handler

        return add

    def get(self, path: str, *, queries: Sequence[Query] = ()) -> Callable[[Handler], Handler]:
        """`route` for GET."""
        return self.route(path, ("GET",), queries=queries)

    def post(self, path: str, *, body: str | None = None) -> Callable[[Handler], Handler]:
        """`route` for POST."""
        return self.route(path, ("POST",), body=body)


class LazyRoutes(BaseRoute):
    """Routes that are made when somebody first asks for one of them.

    Args:
        prefixes: with one of which their paths begin.
        make: makes them.
    """

    def __init__(self, prefixes: tuple[str, ...], make: Callable[[], Router]) -> None:
        self._prefixes = prefixes
        self._make = make
        self._routes: Sequence[Endpoint] | None = None

    @property
    def routes(self) -> Sequence[Endpoint]:
        """All of them."""
        if self._routes is None:
            self._routes = self._make().routes
        return self._routes

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See Starlette's `BaseRoute`: the first one that takes the request, else one that has its path."""
        if scope["type"] != "http" or not scope["path"].startswith(self._prefixes):
            return Match.NONE, {}
        partly: tuple[Match, Scope] = (Match.NONE, {})
        for route in self.routes:
            match, child = route.matches(scope)
            if match is Match.FULL:
                return match, child
            if match is Match.PARTIAL and partly[0] is Match.NONE:
                partly = match, child
        return partly

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See Starlette's `BaseRoute`: `matches` has put the route into the scope."""
        await scope["route"].handle(scope, receive, send)


async def _read_body(request: Request, model: type[BaseModel]) -> BaseModel:
    """Raises InvalidRequest where it is not JSON, or not as the model has it; names the field."""
    from pydantic import ValidationError

    data = await request.body()
    if not data or not _is_json(request.headers):
        raise InvalidRequest(_NO_OBJECT)
    try:
        value = json.loads(data)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError):  # no UTF-8, an endless number, brackets without end
        raise InvalidRequest("the body is not valid JSON that can be read") from None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    # ("messages", 0, "role"): the parameter is the field of the body, the message says where inside it.
    where = [str(part) for part in first["loc"]]
    if not where:
        raise InvalidRequest(_NO_OBJECT)
    raise InvalidRequest(f"{'.'.join(where)}: {first['msg']}", where[0])


def _is_json(headers: Mapping[str, str]) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
