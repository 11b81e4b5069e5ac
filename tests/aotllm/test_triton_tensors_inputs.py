"""What each tensor and parameter asks of the engine, and what is refused by name."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotllm import SamplingParams
from aotllm.errors import AotllmError, InvalidRequest
from aotllm.parameters import parameters
from aotllm.triton_tensors.generation import Generation, Target, generation_of
from aotllm.triton_tensors.input_fields import IGNORED, REFUSED, REFUSED_PARAMETERS
from aotllm.triton_tensors.models import CLASSIC_MODELS, EITHER, IDS, TEXT, TensorModel
from aotllm.triton_tensors.tensors import BYTES, DATA_TYPES, InputTensor, Tensor, decode_raw
from tests.aotllm.byte_tokenizer import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()

CLASSIC_TEXT = (
    "text_input max_tokens num_return_sequences bad_words stop_words exclude_input_in_output end_id pad_id top_k top_p "
    "temperature length_penalty repetition_penalty min_tokens presence_penalty frequency_penalty seed return_log_probs "
    "return_context_logits return_generation_logits return_perf_metrics beam_width stream embedding_bias_words "
    "embedding_bias_weights guided_decoding_guide_type guided_decoding_guide decoder_text_input prompt_embedding_table "
    "num_draft_tokens use_draft_logits "
    "prompt_table_extra_id prompt_vocab_size lora_task_id lora_weights lora_config image_input image_bytes_input "
    "image_url_input video_bytes_input"
)
CLASSIC_IDS = (
    "input_ids encoder_input_features encoder_output_lengths input_lengths request_output_len num_return_sequences "
    "draft_input_ids decoder_input_ids decoder_input_lengths draft_logits draft_acceptance_threshold end_id pad_id "
    "stop_words_list bad_words_list embedding_bias beam_width temperature runtime_top_k runtime_top_p "
    "runtime_top_p_min runtime_top_p_decay runtime_top_p_reset_ids len_penalty "
    "early_stopping repetition_penalty min_tokens "
    "beam_search_diversity_rate presence_penalty frequency_penalty seed return_log_probs return_context_logits "
    "return_generation_logits return_perf_metrics exclude_input_in_output stop streaming prompt_embedding_table "
    "prompt_table_extra_ids prompt_vocab_size cross_attention_mask mrope_rotary_cos_sin mrope_position_deltas "
    "lora_task_id lora_weights lora_config context_phase_params skip_cross_attn_blocks retention_token_range_starts "
    "retention_token_range_ends retention_token_range_priorities retention_token_range_durations_ms "
    "retention_decode_priority retention_decode_duration_ms guided_decoding_guide_type guided_decoding_guide "
    "lookahead_window_size lookahead_ngram_size lookahead_verification_set_size"
)


def ask(
    model: TensorModel,
    values: dict[str, Any],
    given: dict[str, Any] | None = None,
    outputs: frozenset[str] = frozenset(),
    **options: Any,
) -> Generation:
    """What is to be done for tensors (plain values of their type) and parameters."""
    inputs = [tensor(name, value) for name, value in values.items()]
    target = Target(model, TOKENIZER, (EOS,), exclude_input_in_output=False, max_prompts=3)
    return generation_of(inputs, given or {}, target, outputs, **options)


def tensor(name: str, value: Any, shape: list[int] | None = None) -> InputTensor:
    """Of one prompt, unless `shape` says; of words: their two rows."""
    field = EITHER.inputs[name]
    values = value if isinstance(value, list) else [value]
    if field.words and not shape:
        shape, values = [1, 2, len(value[0])], [*value[0], *value[1]]
    return raw(name, field.datatype.name, shape or [1, len(values)], Tensor("", field.datatype, (), values).to_bytes())


def raw(name: str, datatype: str, shape: list[int], data: bytes) -> InputTensor:
    return InputTensor(name, datatype, shape, lambda kind: decode_raw(name, kind, shape, data))


def sampling(generation: Generation) -> SamplingParams:
    (request,) = generation.requests
    assert request.sampling is not None
    return request.sampling


HI = {"text_input": "hi", "max_tokens": 9}
NUMBERS = {"input_ids": [1, 2, 3], "input_lengths": 2, "request_output_len": 9}
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=9)
"""What TensorRT-LLM does when nothing is said"""


@pytest.mark.parametrize("name", CLASSIC_TEXT.split())
def test_the_text_models_have_every_tensor_of_the_classic_ensemble(name: str):
    assert name in TEXT.inputs


@pytest.mark.parametrize("name", CLASSIC_IDS.split())
def test_the_id_model_has_every_tensor_of_the_classic_engine(name: str):
    assert name in IDS.inputs


@pytest.mark.parametrize("name", [name for name, _, _ in parameters(SamplingParams)])
@pytest.mark.parametrize("model", [TEXT, IDS], ids=["text", "ids"])
def test_every_sampling_field_is_an_option_or_refused(model: TensorModel, name: str):
    assert name in model.by_option or name in REFUSED_PARAMETERS


@pytest.mark.parametrize("name", sorted(CLASSIC_MODELS))
def test_the_model_of_both_has_what_each_has(name: str):
    model = CLASSIC_MODELS[name]
    assert {f._replace(required=False) for f in model.inputs.values()} <= set(EITHER.inputs.values())
    assert set(model.outputs.values()) <= set(EITHER.outputs.values())
    assert not REFUSED.keys() & IGNORED


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        # top_k and top_p decide whether there is a draw; where they do not, temperature means nothing
        ({"temperature": 2.0}, {}),
        ({"top_k": 0, "top_p": 0.0, "temperature": 2.0}, {}),
        ({"min_p": 0.25, "typical_p": 0.5}, {"min_p": 0.25, "typical_p": 0.5}),
        ({"top_k": 5}, {"temperature": 1.0, "top_k": 5}),
        ({"top_p": 0.5}, {"temperature": 1.0, "top_p": 0.5}),
        ({"top_p": 1.0}, {"temperature": 1.0}),
        ({"top_k": 1, "top_p": 0.0}, {"temperature": 1.0, "top_k": 1}),
        ({"top_k": 5, "top_p": 0.5, "temperature": 2.0}, {"temperature": 2.0, "top_k": 5, "top_p": 0.5}),
        ({"repetition_penalty": 1.5, "presence_penalty": 0.5}, {"repetition_penalty": 1.5, "presence_penalty": 0.5}),
        ({"frequency_penalty": -0.5, "min_tokens": 3}, {"frequency_penalty": -0.5, "min_tokens": 3}),
        ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
        ({"random_seed": 7, "min_length": 2}, {"seed": 7, "min_tokens": 2}),  # their names of old
        ({"stop_words": ["a", "bc", ""], "bad_words": ["d"]}, {"stop": ("a", "bc"), "bad_words": ("d",)}),
        ({"stop_words": [""], "bad_words": [""]}, {}),
        ({"stop_words": []}, {}),
        ({"num_return_sequences": 3}, {"n": 3}),
        ({"n": 3, "best_of": 4}, {"n": 3, "best_of": 4}),
        ({"end_id": EOS}, {}),
        ({"end_id": 7, "stop_token_ids": [8]}, {"stop_token_ids": (8, 7), "ignore_eos": True}),
        ({"end_id": -1}, {"ignore_eos": True}),
        ({"length_penalty": 0.0, "early_stopping": True}, {}),  # means nothing without beams
        ({"beam_width": 3}, {"n": 3}),
        ({"beam_width": 3, "num_return_sequences": 2}, {"n": 2}),
        ({"return_log_probs": True}, {"logprobs": 0}),
        ({"return_log_probs": False}, {}),
        ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
        ({"allowed_token_ids": [1, 2], "ignore_eos": True}, {"allowed_token_ids": (1, 2), "ignore_eos": True}),
        ({"logit_bias": '{"5": 1.5}'}, {"logit_bias": ((5, 1.5),)}),
        (
            {"embedding_bias_words": ["ab", "a", ""], "embedding_bias_weights": [1.0, 2.0, 5.0]},
            {"logit_bias": ((97, 3.0), (98, 1.0))},
        ),
        (
            {"embedding_bias_words": ["a"], "embedding_bias_weights": [1.0], "logit_bias": '{"97": 1.5}'},
            {"logit_bias": ((97, 2.5),)},
        ),
    ],
    ids=str,
)
def test_sampling_of_text_models(values: dict[str, Any], expected: dict[str, Any]):
    generation = ask(TEXT, HI | values)
    assert generation.requests[0].prompt == "hi"
    assert sampling(generation) == GREEDY.replace(**expected)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"runtime_top_k": 5, "runtime_top_p": 0.5}, {"temperature": 1.0, "top_k": 5, "top_p": 0.5}),
        ({"embedding_bias": [0.0, 1.0, 0.0, -2.0]}, {"logit_bias": ((1, 1.0), (3, -2.0))}),
        ({"stop_words": ["x"]}, {"stop": ("x",)}),
        ({"stop_words_list": [[97, 98, 99], [1, 3, -1]]}, {"stop_token_ids": (97,), "stop": ("bc",)}),
        ({"stop_words_list": [[97, 98, 0, 0], [2, -1, -1, -1]]}, {"stop": ("ab",)}),
        ({"stop_words_list": [[0], [-1]]}, {}),
        ({"stop_words_list": [[], []]}, {}),
        ({"bad_words_list": [[97, 98, 99], [2, 3, -1]]}, {"bad_words": ("ab", "c")}),
    ],
    ids=str,
)
def test_sampling_of_id_models(values: dict[str, Any], expected: dict[str, Any]):
    generation = ask(IDS, NUMBERS | values)
    assert generation.requests[0].prompt_token_ids == [1, 2]
    assert sampling(generation) == GREEDY.replace(**expected)
    if "words" not in next(iter(values)):
        return
    # As a parameter it is the same.
    assert sampling(ask(IDS, NUMBERS, values)) == GREEDY.replace(**expected)


def test_rows_and_what_they_share():
    inputs = [
        tensor("input_ids", [5, 6, 7, 8, 0, 0], [2, 3]),
        tensor("input_lengths", [3, 1], [2, 1]),
        tensor("request_output_len", [9], [1]),
        tensor("stop_words_list", [97, 1, 98, 1], [2, 2, 1]),
    ]
    generation = generation_of(inputs, {}, Target(IDS, TOKENIZER, (EOS,), False, 2))
    assert [request.prompt_token_ids for request in generation.requests] == [[5, 6, 7], [8]]
    expected = [GREEDY.replace(stop_token_ids=(word,)) for word in (97, 98)]
    assert [request.sampling for request in generation.requests] == expected
    inputs.append(tensor("beam_width", [1, 2], [2, 1]))
    with pytest.raises(InvalidRequest, match="beam_width must be the same for all prompts"):
        generation_of(inputs, {}, Target(IDS, TOKENIZER, (EOS,), False, 2))
    with pytest.raises(InvalidRequest, match="must hold 1 to 1 prompts, got 2"):
        generation_of(inputs[:-1], {}, Target(IDS, TOKENIZER, (EOS,), False, 1))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[97, 98], [3, -1]], "ends of words, in order, up to 2, got 3"),
        ([[97, 98], [2, 1]], "got 1"),
        ([[97, 98], [0, -1]], "got 0"),
        ([[97, 98], [1]], "ends of words"),
        ([[0xE2, 0x82], [2, -1]], "no text"),
        ([[-5, 2**31 - 1], [2, -1]], "no text"),
    ],
)
@pytest.mark.parametrize("name", ["stop_words_list", "bad_words_list"])
def test_words_that_are_none(name: str, rows: list[list[int]], message: str):
    with pytest.raises(InvalidRequest, match=message):
        ask(IDS, NUMBERS, {name: rows})


def test_a_bad_word_is_split_as_the_tokenizer_does():
    assert TOKENIZER.encode("</s>", add_special_tokens=False) == [EOS]
    with pytest.raises(InvalidRequest, match="not how the tokenizer splits a text"):
        ask(IDS, NUMBERS, {"bad_words_list": [list(b"</s>"), [4, -1, -1, -1]]})


@pytest.mark.parametrize(
    ("kind", "guide", "field", "value"),
    [
        ("json", "", "json_object", True),
        ("json_schema", '{"type": "string"}', "json", '{"type": "string"}'),
        ("regex", "a+", "regex", "a+"),
        ("ebnf_grammar", 'root ::= "a"', "grammar", 'root ::= "a"'),
    ],
)
def test_guided_decoding(kind: str, guide: str, field: str, value: object):
    (request,) = ask(TEXT, HI | {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}).requests
    assert getattr(request.structured_outputs, field) == value
    (request,) = ask(TEXT, HI | {"guided_decoding_guide_type": "", "guided_decoding_guide": ""}).requests
    assert request.structured_outputs is None


def test_beam_search():
    beams = ask(IDS, NUMBERS | {"beam_width": 3, "len_penalty": 0.5, "early_stopping": False}).beams
    assert beams is not None
    assert (beams.beam_width, beams.length_penalty, beams.early_stopping) == (3, 0.5, "false")
    beams = ask(TEXT, HI | {"beam_width": 3}).beams
    assert beams is not None
    assert (beams.length_penalty, beams.early_stopping) == (0.0, "true")
    assert ask(TEXT, HI | {"beam_width": 1}).beams is None


@pytest.mark.parametrize(
    ("values", "pad_id"), [({}, EOS), ({"end_id": 5}, 5), ({"end_id": -1}, EOS), ({"end_id": 5, "pad_id": 6}, 6)]
)
def test_what_fills_up_shorter_answers(values: dict[str, Any], pad_id: int):
    assert ask(TEXT, HI | values).pad_id == pad_id


def either(name: str) -> tuple[TensorModel, dict[str, Any]]:
    """A model that has this input, and what it must be given."""
    return (TEXT, HI) if name in TEXT.inputs else (IDS, NUMBERS)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_the_answer_is_refused_by_name(name: str):
    model, complete = either(name)
    other: Any = {"BYTES": "x", "BOOL": True}.get(model.inputs[name].datatype.name, 1)
    other = 0.5 if name == "runtime_top_p_decay" else other
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported here; ") as refused:
        ask(model, complete | {name: other})
    assert refused.value.param == name
    if name == "stop":
        return  # as a parameter it is the sampling field
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported here; "):
        ask(model, complete, {name: other})


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_asks_for_nothing_is_let_pass(name: str):
    model, complete = either(name)
    for value in [[], *REFUSED[name][0]]:
        assert sampling(ask(model, complete | {name: value})) == GREEDY


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_cannot_change_the_answer_is_let_pass(name: str):
    model, complete = either(name)
    assert sampling(ask(model, complete | {name: 1})) == GREEDY
    assert sampling(ask(model, complete, {name: 1})) == GREEDY


@pytest.mark.parametrize("name", sorted(REFUSED_PARAMETERS))
def test_what_has_no_output_is_refused(name: str):
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported here; use return_log_probs"):
        ask(TEXT, HI, {name: 1})
    with pytest.raises(InvalidRequest, match=f"no input '{name}'"):
        generation_of([raw(name, "INT32", [1, 1], bytes(4))], {}, Target(TEXT, TOKENIZER, (EOS,), False, 1))


@pytest.mark.parametrize(
    ("values", "given", "message"),
    [
        ({"random_seed": 1, "seed": 2}, {}, "random_seed and seed: given twice|seed and random_seed: given twice"),
        ({"stop_words": ["a"]}, {"stop": ["b"]}, "stop_words: given twice"),
        ({"top_k": 1}, {"top_k": 2}, "top_k: given twice"),
        ({}, {"top_k": "2"}, "top_k takes elements of type INT32, got '2'"),
        ({}, {"top_k": [1, 2]}, "top_k takes one value, got 2"),
        ({}, {"top_k": True}, "top_k takes elements"),
        ({}, {"temperature": "hot"}, "temperature takes elements of type FP32"),
        ({"temperature": float("nan")}, {}, "temperature must be"),
        ({"temperature": float("inf")}, {}, "temperature must be"),
        ({"temperature": -1.0}, {}, "temperature must be"),
        ({"top_p": 1.5}, {}, "top_p must be"),
        ({"max_tokens": 0}, {}, "max_tokens must be"),
        ({"embedding_bias_words": ["a"]}, {}, "1 words, embedding_bias_weights 0 weights"),
        ({"logit_bias": "[1]"}, {}, "logit_bias must be a JSON object"),
        ({"logit_bias": "{", "top_k": 1}, {}, "logit_bias must be a JSON object"),
        ({"logit_bias": '{"x": 1}'}, {}, "logit_bias must be"),
        ({"end_id": -2}, {}, "stop_token_ids must be"),
        ({"min_tokens": 10}, {}, "min_tokens must be at most max_tokens"),
        ({"beam_width": 2, "stream": True}, {}, "beam search cannot stream"),
        ({"beam_width": 100}, {}, "beam_width must be"),
        ({"beam_width": 0}, {}, "beam_width must be"),
        ({"guided_decoding_guide_type": "poem"}, {}, "guided_decoding_guide_type must be one of json, "),
        ({"guided_decoding_guide_type": "regex"}, {}, "guided_decoding_guide must be a string that is not"),
        ({}, {"timeout": -1}, "timeout must be"),
    ],
    ids=str,
)
def test_contradictions_and_wrong_values(values: dict[str, Any], given: dict[str, Any], message: str):
    with pytest.raises(InvalidRequest, match=message):
        ask(TEXT, HI | values, given)


@pytest.mark.parametrize("length", [0, -1, 4])
def test_input_lengths_lie_within_the_ids(length: int):
    with pytest.raises(InvalidRequest, match="input_lengths must be 1 to 3"):
        ask(IDS, NUMBERS | {"input_lengths": length})


@pytest.mark.parametrize(
    ("values", "message"), [({}, "got neither"), ({"text_input": "a", "input_ids": [1]}, "got both")]
)
def test_the_model_of_both_takes_one_of_them(values: dict[str, Any], message: str):
    with pytest.raises(InvalidRequest, match=f"one of text_input and input_ids, {message}"):
        ask(EITHER, {"max_tokens": 9} | values)
    assert ask(EITHER, {"text_input": "a"}).requests[0].prompt == "a"
    assert ask(EITHER, {"input_ids": [1, 2], "runtime_top_k": 4}).requests[0].prompt_token_ids == [1, 2]


def test_parameters_are_named_as_inputs_or_as_the_options_they_set():
    given = {"runtime_top_k": 3, "stop": ["."], "priority": 4, "cache_salt": "s", "timeout": 2_500_000}
    (request,) = ask(IDS, NUMBERS, given | {"sequence_id": 7, "triton_enable_empty_final_response": True}).requests
    assert request.sampling == GREEDY.replace(temperature=1.0, top_k=3, stop=(".",))
    assert (request.priority, request.cache_salt, request.timeout) == (4, "s", 2.5)
    assert sampling(ask(TEXT, HI, {"logit_bias": {"5": 1.5}})).logit_bias == ((5, 1.5),)
    assert sampling(ask(IDS, {**NUMBERS, "request_output_len": []}, {"max_tokens": 3})).max_tokens == 3


def test_outputs_are_those_listed_or_asked_for():
    assert ask(TEXT, HI).outputs == {"text_output"}
    assert ask(IDS, NUMBERS).outputs == {"output_ids", "sequence_length"}
    flags = HI | {"return_log_probs": True}
    assert ask(TEXT, flags).outputs == {"text_output", "cum_log_probs", "output_log_probs"}
    listed = frozenset(("cum_log_probs", "batch_index"))
    assert ask(TEXT, HI, outputs=listed).outputs == listed
    assert sampling(ask(TEXT, HI, outputs=listed)).logprobs == 0
    # Triton lists all outputs where the client lists none.
    every = frozenset(TEXT.outputs)
    assert ask(TEXT, HI, outputs=every, listing_asks=False).outputs == {"text_output", "batch_index", "sequence_index"}
    assert ask(TEXT, flags, outputs=listed, listing_asks=False).outputs == listed


def test_outputs_that_do_not_exist_are_refused():
    with pytest.raises(InvalidRequest, match=r"no output 'context_logits'.*text_output"):
        ask(TEXT, HI, outputs=frozenset(("context_logits",)))
    with pytest.raises(InvalidRequest, match="no output 'text_output'"):
        ask(IDS, NUMBERS, outputs=frozenset(("text_output",)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
NAMES = st.sampled_from(sorted({*EITHER.inputs, *REFUSED_PARAMETERS, "timeout", "priority", "cache_salt", "x"}))
TYPE_NAMES = st.sampled_from([*DATA_TYPES, "", "x"])
SIZES = st.one_of(st.integers(-1, 3), st.sampled_from([2**31, 2**63 - 1]))
DATA = st.one_of(
    st.binary(max_size=16),
    st.integers(-(2**31), 2**31 - 1).map(lambda v: struct.pack("<i", v)),
    st.text(max_size=4).map(lambda t: Tensor("t", BYTES, (1,), [t]).to_bytes()),
)


@settings(max_examples=300)
@given(
    st.sampled_from([(TEXT, HI), (IDS, NUMBERS), (EITHER, HI)]),
    st.lists(st.tuples(NAMES, TYPE_NAMES, st.lists(SIZES, max_size=4), DATA), max_size=5),
    st.dictionaries(NAMES, JSON, max_size=3),
    st.booleans(),
)
def test_any_request_is_understood_or_refused(
    model: tuple[TensorModel, dict[str, Any]],
    given_tensors: list[tuple[str, str, list[int], bytes]],
    given: dict[str, Any],
    complete: bool,
):
    base = [tensor(name, value) for name, value in model[1].items()] if complete else []
    inputs = [*base, *(raw(*parts) for parts in given_tensors)]
    with contextlib.suppress(AotllmError):
        assert generation_of(inputs, given, Target(model[0], TOKENIZER, (EOS,), False, 3)).requests
