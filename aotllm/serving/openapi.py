"""`openapi_document`: what the HTTP API takes, in the words of OpenAPI 3.1."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import aotllm
from aotllm.serving.router import Endpoint

_JSON_TYPES = {str: "string", float: "number"}
_DONE = {"200": {"description": "Success", "content": {"application/json": {"schema": {}}}}}


def openapi_document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Paths, parameters and schemas of bodies, of the endpoints that are to be shown. Schemas of answers are those of
    OpenAI's API and not in it."""
    from pydantic.json_schema import models_json_schema

    shown = [endpoint for endpoint in endpoints if endpoint.include_in_schema]
    models = {endpoint.body_model() for endpoint in shown if endpoint.has_body}
    references, definitions = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in shown:
        operations = paths.setdefault(endpoint.path_format, {})
        for method in sorted(endpoint.methods or ()):
            operation: dict[str, Any] = {"operationId": _operation_id(method, endpoint), "responses": _DONE}
            if parameters := _parameters(endpoint):
                operation["parameters"] = parameters
            if endpoint.has_body:
                schema = references[endpoint.body_model(), "validation"]
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
            operations[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "aotllm", "version": aotllm.__version__},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }


def _operation_id(method: str, endpoint: Endpoint) -> str:
    return f"{method.lower()}{re.sub(r'[^a-z0-9]+', '_', endpoint.path_format.lower()).rstrip('_')}"


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in endpoint.param_convertors
    ]
    in_query = [
        {
            "name": query.name,
            "in": "query",
            "required": False,
            "description": query.doc,
            "schema": {"type": _JSON_TYPES[query.kind]},
        }
        for query in endpoint.queries
    ]
    return in_path + in_query
