"""Beam search finds what Hugging Face's finds, on one random float32 model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from aotllm.beam_search import BeamSearch, BeamSearchParams
from aotllm.request import TokenLogprob

VOCAB_SIZE = 48


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    import torch
    import transformers

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a model this small only waits for its threads
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25)
    yield model
    torch.set_num_threads(threads)


def ours(model: Any, prompt: list[int], params: BeamSearchParams, max_tokens: int, ends: list[int]) -> list[list[int]]:
    import torch

    search = BeamSearch(params, max_tokens, frozenset(ends))
    while not search.done:
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *beam.token_ids] for beam in search.live])
            rows = torch.log_softmax(model(ids).logits[:, -1].float(), dim=-1)
            values, indices = rows.topk(min(search.num_top, VOCAB_SIZE))
        search.advance(
            [
                TokenLogprob(int(i[0]), float(v[0]), tuple(zip(i.tolist(), v.tolist(), strict=True)))
                for v, i in zip(values, indices, strict=True)
            ]
        )
    return [list(hypothesis.beam.token_ids) for hypothesis in search.finished]


def theirs(
    model: Any, prompt: list[int], params: BeamSearchParams, max_tokens: int, ends: list[int]
) -> list[list[int]]:
    import torch

    output = model.generate(
        torch.tensor([prompt]),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping={"true": True, "false": False}.get(params.early_stopping, params.early_stopping),
        max_new_tokens=max_tokens,
        eos_token_id=ends,
        pad_token_id=0,
        do_sample=False,
    )
    answers = []
    for row in output[:, len(prompt) :].tolist():
        end = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
        answers.append(row[: end + 1])
    return answers


@pytest.mark.parametrize("early_stopping", ["true", "false", "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize(("width", "ends"), [(2, [2]), (3, [2, 5, 7, 11]), (5, list(range(2, 12)))], ids=str)
def test_same_answers_in_the_same_order(
    model: Any, width: int, ends: list[int], length_penalty: float, early_stopping: str
) -> None:
    params = BeamSearchParams(width, length_penalty, early_stopping)
    for seed in range(2):
        prompt = [(seed * 17 + place * 5) % 30 + 12 for place in range(4 + seed)]
        assert ours(model, prompt, params, 7, ends) == theirs(model, prompt, params, 7, ends)
