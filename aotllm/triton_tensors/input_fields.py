"""The tensors that models take: those of TensorRT-LLM's classic models, and the rest of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from aotllm.parameters import ParameterSpec, parameters
from aotllm.sampling_params import SamplingParams
from aotllm.triton_tensors.tensors import BOOL, BYTES, DATA_TYPES, FP32, INT32, UINT64, DataType


class InputField(NamedTuple):
    """One input tensor, without its batch dimension, which is always there."""

    name: str
    datatype: DataType
    dims: tuple[int, ...] = (1,)
    """Sizes; −1 = any"""
    required: bool = False
    option: str = ""
    """What it sets; empty = what its name says. Fields of `SamplingParams` have the same names"""

    @property
    def sets(self) -> str:
        """Name of the option that it sets."""
        return self.option or self.name

    @property
    def many(self) -> bool:
        """A list of any length, else one element."""
        return self.dims == (-1,)

    @property
    def words(self) -> bool:
        """A list of token sequences: their ids one after the other, and where each of them ends, then −1."""
        return self.dims == (2, -1)

    @property
    def supported(self) -> bool:
        """It may hold any value, else only what asks for nothing."""
        return self.name not in REFUSED


_ADAPTER = "LoRA adapters are models of `aotllm serve`: name the adapter in place of the model"
_NO_REASON = "leave it out"

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("lora_task_id", "lora_weights", "lora_config"), ((), _ADAPTER)),
    "stop": ((False,), "cancel the call instead"),
    "return_context_logits": ((False,), _NO_REASON),
    "beam_search_diversity_rate": ((0.0,), _NO_REASON),
    "runtime_top_p_decay": ((0.0, 1.0), _NO_REASON),
    "skip_cross_attn_blocks": ((False,), _NO_REASON),
    "mrope_position_deltas": ((0,), _NO_REASON),
    **dict.fromkeys(("decoder_text_input", "image_url_input"), (("",), _NO_REASON)),
    **dict.fromkeys(
        (
            "image_input",
            "image_bytes_input",
            "video_bytes_input",
            "prompt_embedding_table",
            "prompt_table_extra_id",
            "prompt_table_extra_ids",
            "encoder_input_features",
            "decoder_input_ids",
            "draft_input_ids",
            "draft_logits",
            "cross_attention_mask",
            "mrope_rotary_cos_sin",
            "context_phase_params",
        ),
        ((), _NO_REASON),
    ),
}
"""Inputs that would change the answer, and cannot be honoured -> the values that ask for nothing, and what to do
instead"""

IGNORED = frozenset(
    [
        "lookahead_window_size",
        "lookahead_ngram_size",
        "lookahead_verification_set_size",
        "num_draft_tokens",
        "use_draft_logits",
        "retention_token_range_starts",
        "retention_token_range_ends",
        "retention_token_range_priorities",
        "retention_token_range_durations_ms",
        "retention_decode_priority",
        "retention_decode_duration_ms",
        "encoder_output_lengths",
        "decoder_input_lengths",
        "draft_acceptance_threshold",
        "prompt_vocab_size",
        "runtime_top_p_min",
        "runtime_top_p_reset_ids",
    ]
)
"""Inputs that cannot change the answer: hints about speed, and what belongs to an input of `REFUSED`"""

REFUSED_PARAMETERS: Mapping[str, str] = dict.fromkeys(
    ("logprobs", "prompt_logprobs"), "use return_log_probs, which reports those of the generated tokens"
)
"""Fields of `SamplingParams` that no output is for -> what to do instead"""


def _fields(table: str) -> list[InputField]:
    """One `name TYPE dims [required] [=option]` a line."""
    fields = []
    for line in filter(None, map(str.strip, table.splitlines())):
        name, datatype, dims, *rest = line.split()
        option = next((word[1:] for word in rest if word.startswith("=")), "")
        sizes = tuple(int(size) for size in dims.split(","))
        fields.append(InputField(name, DATA_TYPES[datatype], sizes, "required" in rest, option))
    return fields


_SHARED = """
    num_return_sequences INT32 1 =n
    exclude_input_in_output BOOL 1
    end_id INT32 1
    pad_id INT32 1
    temperature FP32 1
    early_stopping BOOL 1
    repetition_penalty FP32 1
    min_tokens INT32 1
    min_length INT32 1 =min_tokens
    presence_penalty FP32 1
    frequency_penalty FP32 1
    seed UINT64 1
    random_seed UINT64 1 =seed
    beam_width INT32 1
    return_log_probs BOOL 1
    return_context_logits BOOL 1
    return_generation_logits BOOL 1
    return_perf_metrics BOOL 1
    return_num_input_tokens BOOL 1
    return_num_output_tokens BOOL 1
    guided_decoding_guide_type BYTES 1
    guided_decoding_guide BYTES 1
    prompt_embedding_table FP16 -1,-1
    prompt_vocab_size INT32 1
    lora_task_id UINT64 1
    lora_weights FP16 -1,-1
    lora_config INT32 -1,3
"""

_TEXT = """
    text_input BYTES 1 required
    max_tokens INT32 1 required
    stop_words BYTES -1 =stop
    bad_words BYTES -1
    top_k INT32 1
    top_p FP32 1
    length_penalty FP32 1
    stream BOOL 1
    embedding_bias_words BYTES -1
    embedding_bias_weights FP32 -1
    decoder_text_input BYTES 1
    prompt_table_extra_id UINT64 1
    num_draft_tokens INT32 1
    use_draft_logits BOOL 1
    image_input FP16 -1,3,-1,-1
    image_bytes_input UINT8 -1,-1,-1,-1
    image_url_input BYTES 1
    video_bytes_input UINT8 -1,-1,-1,-1
"""

_IDS = """
    input_ids INT32 -1 required
    input_lengths INT32 1 required
    request_output_len INT32 1 required =max_tokens
    stop_words_list INT32 2,-1
    bad_words_list INT32 2,-1
    stop_words BYTES -1 =stop
    runtime_top_k INT32 1 =top_k
    runtime_top_p FP32 1 =top_p
    runtime_top_p_min FP32 1
    runtime_top_p_decay FP32 1
    runtime_top_p_reset_ids INT32 1
    len_penalty FP32 1 =length_penalty
    streaming BOOL 1 =stream
    stop BOOL 1
    embedding_bias FP32 -1
    beam_search_diversity_rate FP32 1
    encoder_input_features FP16 -1,-1
    encoder_output_lengths INT32 1
    decoder_input_ids INT32 -1
    decoder_input_lengths INT32 1
    draft_input_ids INT32 -1
    draft_logits FP32 -1,-1
    draft_acceptance_threshold FP32 1
    prompt_table_extra_ids UINT64 -1
    cross_attention_mask BOOL -1,-1
    mrope_rotary_cos_sin FP32 -1
    mrope_position_deltas INT64 1
    context_phase_params UINT8 -1
    skip_cross_attn_blocks BOOL 1
    retention_token_range_starts INT32 -1
    retention_token_range_ends INT32 -1
    retention_token_range_priorities INT32 -1
    retention_token_range_durations_ms INT32 -1
    retention_decode_priority INT32 1
    retention_decode_duration_ms INT32 1
    lookahead_window_size INT32 1
    lookahead_ngram_size INT32 1
    lookahead_verification_set_size INT32 1
"""


def _sampling_field(name: str, spec: ParameterSpec) -> InputField:
    if spec.key is not None:
        return InputField(name, BYTES)  # a JSON object as text
    if name == "seed":
        return InputField(name, UINT64)
    datatype = {bool: BOOL, int: INT32, float: FP32, str: BYTES}[spec.kind]
    return InputField(name, datatype, (-1,) if spec.many else (1,))


_OTHERWISE = {"max_tokens", "stop", *REFUSED_PARAMETERS}
"""Fields of `SamplingParams` that have another tensor, or none"""


def _with_sampling(table: str) -> dict[str, InputField]:
    """The table, and a tensor for each field of `SamplingParams` that it has none of the same name for."""
    own = {field.name: field for field in _fields(table)}
    generated = {
        name: _sampling_field(name, spec)
        for name, _, spec in parameters(SamplingParams)
        if name not in own and name not in _OTHERWISE
    }
    return own | generated


TEXT_INPUTS: Mapping[str, InputField] = _with_sampling(_TEXT + _SHARED)
"""Of models that take text: `ensemble` and `tensorrt_llm_bls`"""
ID_INPUTS: Mapping[str, InputField] = _with_sampling(_IDS + _SHARED)
"""Of models that take token ids: `tensorrt_llm`"""
