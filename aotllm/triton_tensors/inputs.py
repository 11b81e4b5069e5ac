"""`read_inputs`: the tensors and parameters of a request as options per prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aotllm.errors import InvalidRequest
from aotllm.triton_tensors.input_fields import IGNORED, REFUSED, REFUSED_PARAMETERS, InputField
from aotllm.triton_tensors.models import TensorModel
from aotllm.triton_tensors.tensors import InputTensor, checked_element, element_count, flat

Options = dict[str, Any]
"""Name of an option -> its value; a list where the tensor is one"""
_PROMPTS = ("text_input", "input_ids")


def read_inputs(
    tensors: Sequence[InputTensor], parameters: Mapping[str, Any], model: TensorModel, max_prompts: int
) -> list[Options]:
    """What is wanted for each prompt of the batch. An empty tensor is the same as none.

    Args:
        tensors: the inputs that were given.
        parameters: of the request, by the name of an input or of the option that it sets. They count like tensors;
            other ones are left to those who know them.
        model: its fields.
        max_prompts: most prompts of a request.

    Raises:
        InvalidRequest: a tensor is unknown, would change the answer and cannot be honoured, is of the wrong type or
            shape, or given twice; a required one is missing; batch sizes differ.
    """
    columns: dict[str, tuple[str, list[Any]]] = {}  # option -> name it came by, value per prompt or one for all
    for tensor in tensors:
        field = _field_of(tensor, model.inputs)
        rows = [] if field is None else _rows(tensor, field)
        if field is not None and rows:
            _put(columns, field, rows)
    for name, value in parameters.items():
        parameter = _field_of_parameter(name, value, model)
        if parameter is not None:
            _put(columns, parameter, [_plain(parameter, value)])
    for field in model.inputs.values():
        if field.required and field.sets not in columns:
            raise InvalidRequest(
                f"{field.name} is missing: a tensor {field.datatype.name} {list(field.dims)}", field.name
            )
    return _per_prompt(columns, max_prompts)


def _field_of(tensor: InputTensor, fields: Mapping[str, InputField]) -> InputField | None:
    """What a tensor sets; None for one that asks for nothing. Raises InvalidRequest."""
    name = tensor.name
    field = fields.get(name)
    if field is None:
        known = ", ".join(field.name for field in fields.values() if field.supported)
        raise InvalidRequest(f"there is no input {name!r:.80}; the inputs of this model are {known}", name[:80])
    if name in IGNORED:
        return None
    if not field.supported and REFUSED[name][0] == ():
        if element_count(name, tensor.shape):
            raise _refused(name)
        return None
    if tensor.datatype != field.datatype.name:
        raise InvalidRequest(f"{name} must be of type {field.datatype.name}, got {tensor.datatype!r:.40}", name)
    if not field.supported:
        if any(value not in REFUSED[name][0] for value in tensor.decode(field.datatype)):
            raise _refused(name)
        return None
    return field


def _field_of_parameter(name: str, value: Any, model: TensorModel) -> InputField | None:
    field = model.by_option.get(name) or model.inputs.get(name)
    if field is not None and field.supported:
        return None if name in IGNORED else field
    if name in REFUSED and not any(value is off or value == off for off in REFUSED[name][0]):
        raise _refused(name)
    if name in REFUSED_PARAMETERS:
        raise InvalidRequest(f"{name} is not supported here; {REFUSED_PARAMETERS[name]}", name)
    return None


def _refused(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is not supported here; {REFUSED[name][1]}", name)


def _put(columns: dict[str, tuple[str, list[Any]]], field: InputField, rows: list[Any]) -> None:
    if field.sets in columns:
        other = columns[field.sets][0]
        names = field.name if other == field.name else f"{other} and {field.name}"
        raise InvalidRequest(f"{names}: given twice; give it once", field.name)
    columns[field.sets] = field.name, rows


def _rows(tensor: InputTensor, field: InputField) -> list[Any]:
    """The value per prompt, or one for all: `[1]`, `[1,1]` and `[batch,1]` of a single element, `[k]`, `[1,k]` and
    `[batch,k]` of a list."""
    shape = tensor.shape
    values = tensor.decode(field.datatype)
    if not values:
        return []
    if field.words:
        if len(shape) in (2, 3) and shape[-2] == 2:
            step = 2 * shape[-1]
            return [_words(field.name, values[at : at + step]) for at in range(0, len(values), step)]
    elif field.many:
        if len(shape) == 1:
            return [values]
        if len(shape) == 2:
            return [values[at : at + shape[1]] for at in range(0, len(values), shape[1])]
    elif len(shape) <= 1 or (len(shape) == 2 and shape[1] == 1):
        return values
    raise InvalidRequest(
        f"{field.name} must be of shape {['batch', *field.dims]} or {field.dims}, got {list(shape)!r:.80}".replace(
            "'", ""
        ),
        field.name,
    )


def _plain(field: InputField, value: Any) -> Any:
    """The value of a parameter."""
    if isinstance(value, dict) and field.sets == "logit_bias":
        return value  # as JSON has it; else it is text
    values = [checked_element(field.name, field.datatype, element) for element in flat(value)]
    if field.words:
        return _words(field.name, values)
    if field.many:
        return values
    if len(values) != 1:
        raise InvalidRequest(f"{field.name} takes one value, got {len(values)}", field.name)
    return values[0]


def _words(name: str, values: list[int]) -> list[list[int]]:
    """The token sequences out of ids and ends, of which there are equally many. Raises InvalidRequest."""
    width, odd = divmod(len(values), 2)
    words, start = [], 0
    for end in values[width:]:
        if end < 0:
            break
        if odd or not start < end <= width:
            raise InvalidRequest(
                f"{name}: the second row has the ends of words, in order, up to {width}, got {end}", name
            )
        words.append(values[start:end])
        start = end
    return words


def _per_prompt(columns: Mapping[str, tuple[str, list[Any]]], max_prompts: int) -> list[Options]:
    given = [name for name in _PROMPTS if name in columns]
    if len(given) != 1:
        got = "both" if given else "neither"
        raise InvalidRequest(f"a request needs one of {' and '.join(_PROMPTS)}, got {got}", _PROMPTS[0])
    prompt = given[0]
    batch = len(columns[prompt][1])
    if not 1 <= batch <= max_prompts:
        raise InvalidRequest(f"{prompt} must hold 1 to {max_prompts} prompts, got {batch}", prompt)
    for name, rows in columns.values():
        if len(rows) not in (1, batch):
            raise InvalidRequest(
                f"{name} has {len(rows)} values for {batch} prompt{'s' * (batch != 1)}; give 1 or {batch}", name
            )
    return [
        {option: rows[0] if len(rows) == 1 else rows[index] for option, (_, rows) in columns.items()}
        for index in range(batch)
    ]


def same_for_all(options: Sequence[Options], name: str, default: Any) -> Any:
    """An option that a batch has in common. Raises InvalidRequest where the prompts differ."""
    first = options[0].get(name, default)
    if any(other.get(name, default) != first for other in options):
        raise InvalidRequest(f"{name} must be the same for all prompts of a request", name)
    return first
