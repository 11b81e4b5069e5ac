"""`ServingOptions`: how a server answers, besides what its engines are."""

from __future__ import annotations

from dataclasses import dataclass

from aotllm.errors import InvalidRequest
from aotllm.parameters import ParameterSpec, check_parameters, documented, parameter


@documented
@dataclass(frozen=True)
class ServingOptions:
    """Each field is declared here and nowhere else: the flags of `aotllm serve` are generated from it.

    Raises:
        InvalidRequest: a value is out of range; `param` names it.
    """

    api_key: tuple[str, ...] = parameter(
        (),
        ParameterSpec(
            "Key that requests under /v1 and /v2 must bring as `Authorization: Bearer KEY`; may be repeated; none = "
            "open.",
            str,
            many=True,
            max_items=1000,
        ),
    )
    max_body_bytes: int = parameter(
        64 << 20,
        ParameterSpec("Longest body of an HTTP request, or message of gRPC, in bytes.", int, low=1, high=2**40),
    )
    max_prompts: int = parameter(
        1024, ParameterSpec("Most prompts of one request to /v1/completions or /v1/embeddings.", int, low=1, high=2**20)
    )
    ssl_certfile: str | None = parameter(
        None, ParameterSpec("PEM file with the server's certificate chain: TLS for HTTP and gRPC.", str, optional=True)
    )
    ssl_keyfile: str | None = parameter(
        None, ParameterSpec("PEM file with the private key of ssl_certfile.", str, optional=True)
    )

    max_stored_responses: int = parameter(
        1000,
        ParameterSpec(
            "Answers of /v1/responses that are kept for previous_response_id, the latest ones; 0 = none.",
            int,
            low=0,
            high=10**6,
        ),
    )
    allow_runtime_lora: bool = parameter(
        False,
        ParameterSpec(
            "Let clients load LoRA adapters from folders of the server, and unload them, through "
            "/v1/load_lora_adapter and /v1/unload_lora_adapter.",
            bool,
        ),
    )
    allowed_origins: tuple[str, ...] = parameter(
        (),
        ParameterSpec(
            "Origin (https://example.org) whose pages may call the server from a browser; may be repeated; * = any; "
            "none = no CORS headers are sent.",
            str,
            many=True,
            max_items=1000,
        ),
    )
    allowed_methods: tuple[str, ...] = parameter(
        ("*",),
        ParameterSpec("HTTP method that such pages may use; may be repeated; * = any.", str, many=True, max_items=100),
    )
    allowed_headers: tuple[str, ...] = parameter(
        ("*",),
        ParameterSpec("Header that such pages may send; may be repeated; * = any.", str, many=True, max_items=1000),
    )
    allow_credentials: bool = parameter(
        False, ParameterSpec("Let browsers send cookies and other credentials with calls of such pages.", bool)
    )

    tool_call_parser: str = parameter(
        "auto",
        ParameterSpec(
            "Form of the tool calls that the models write when tool_choice is auto; auto = by the chat template.",
            str,
            choices=("auto", "none", "hermes", "llama3_json", "mistral", "json"),
        ),
    )
    reasoning_parser: str = parameter(
        "auto",
        ParameterSpec(
            "How models mark their reasoning, which then comes apart from the content; auto = by the chat template.",
            str,
            choices=("auto", "none", "deepseek_r1", "qwen3", "mistral"),
        ),
    )
    trust_request_chat_template: bool = parameter(
        False, ParameterSpec("Let requests bring chat templates of their own, which are programs.", bool)
    )
    exclude_input_in_output: bool = parameter(
        False,
        ParameterSpec(
            "Answers to KServe and Triton clients that do not stream come without the prompt in front, unless the "
            "client says otherwise; as of the classic TensorRT-LLM models, off is the default.",
            bool,
        ),
    )

    log_level: str = parameter(
        "info",
        ParameterSpec(
            "Least severe messages that are logged; requests are logged as info.",
            str,
            choices=("debug", "info", "warning", "error"),
        ),
    )
    log_requests: bool = parameter(True, ParameterSpec("Log a line of JSON per request when it ends.", bool))
    log_prompts: bool = parameter(False, ParameterSpec("With it, the start of the prompt.", bool))
    log_prompt_chars: int = parameter(
        200, ParameterSpec("Most characters of a prompt in the log.", int, low=1, high=2**20)
    )
    otlp_endpoint: str | None = parameter(
        None,
        ParameterSpec(
            "URL of an OpenTelemetry collector (OTLP over HTTP, http://HOST:4318) that gets a trace per request; "
            "None = no traces.",
            str,
            optional=True,
        ),
    )
    status_page: bool = parameter(
        True, ParameterSpec("Serve a page at / with live figures and a chat; its figures are open to everybody.", bool)
    )

    def __post_init__(self) -> None:
        check_parameters(self)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            missing = "ssl_keyfile" if self.ssl_keyfile is None else "ssl_certfile"
            raise InvalidRequest("ssl_certfile and ssl_keyfile are given together", missing)
