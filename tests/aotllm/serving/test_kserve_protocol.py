"""The wire definition is compiled, is Triton's own, and gets along with Triton's own in one process."""

from __future__ import annotations

from typing import Any

import generate_protocol
import pytest
from google.protobuf import descriptor_pool
from tritonclient.grpc import model_config_pb2, service_pb2

from aotllm.serving.kserve.protocol import messages
from aotllm.serving.kserve.protocol.descriptor import FILE_DESCRIPTOR

OURS = messages.SERVICE.file


def test_the_module_is_up_to_date():
    assert generate_protocol.compiled() == FILE_DESCRIPTOR


def test_descriptors_stay_out_of_the_pool_of_everybody():
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindFileByName(OURS.name)
    assert messages.ModelInferRequest.DESCRIPTOR is not service_pb2.ModelInferRequest.DESCRIPTOR


def all_messages(types: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for message in types.values():
        found[message.full_name] = message
        found |= all_messages(message.nested_types_by_name)
    return found


THEIRS = all_messages(service_pb2.DESCRIPTOR.message_types_by_name) | all_messages(
    model_config_pb2.DESCRIPTOR.message_types_by_name
)
NEWER = {"inference.InferResponseStatistics", "inference.ModelStatistics.ResponseStatsEntry"}
"""Messages that old clients do not have"""


def described(field: Any) -> tuple[Any, ...]:
    message = field.message_type.full_name if field.message_type is not None else None
    enum = field.enum_type.full_name if field.enum_type is not None else None
    oneof = field.containing_oneof.name if field.containing_oneof is not None else None
    repeated = getattr(field, "is_repeated", None)
    return field.number, field.type, repeated, message, enum, oneof


@pytest.mark.parametrize("name", sorted(all_messages(OURS.message_types_by_name)))
def test_a_message_has_the_fields_of_triton(name: str):
    if name in NEWER and name not in THEIRS:
        pytest.skip("the installed client is older than this message")
    ours, theirs = all_messages(OURS.message_types_by_name)[name], THEIRS[name]
    common = set(ours.fields_by_name) & set(theirs.fields_by_name)
    assert {f: described(ours.fields_by_name[f]) for f in common} == {
        f: described(theirs.fields_by_name[f]) for f in common
    }
    # What one of them lacks has a number that the other does not use for something else.
    numbers = {field.number: field.name for field in theirs.fields}
    assert all(numbers.get(field.number, field.name) == field.name for field in ours.fields)


@pytest.mark.parametrize("name", sorted(all_messages(OURS.message_types_by_name)))
def test_only_the_configuration_and_new_fields_differ(name: str):
    if name not in THEIRS:
        pytest.skip("the installed client is older than this message")
    missing = set(THEIRS[name].fields_by_name) - set(all_messages(OURS.message_types_by_name)[name].fields_by_name)
    assert not missing or THEIRS[name].file.name == "model_config.proto"


def test_enums_are_those_of_triton():
    ours, theirs = OURS.enum_types_by_name["DataType"], model_config_pb2.DESCRIPTOR.enum_types_by_name["DataType"]
    assert {v.name: v.number for v in ours.values} == {v.name: v.number for v in theirs.values}


def test_the_service_is_that_of_triton():
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]

    def rpcs(service: Any) -> dict[str, tuple[Any, ...]]:
        return {
            m.name: (m.input_type.full_name, m.output_type.full_name, m.client_streaming, m.server_streaming)
            for m in service.methods
        }

    assert messages.SERVICE.full_name == theirs.full_name
    assert rpcs(messages.SERVICE) == rpcs(theirs)


def test_their_bytes_are_our_message():
    theirs = service_pb2.ModelInferRequest(model_name="m", id="7", raw_input_contents=[b"\1\0\0\0x"])
    theirs.parameters["priority"].uint64_param = 3
    theirs.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    ours = messages.ModelInferRequest.FromString(theirs.SerializeToString())
    assert str(ours) == str(theirs)
