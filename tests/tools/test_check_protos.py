"""The gRPC API's messages follow the rules, and stay what clients were built with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet

from tools.check_protos import accepted, read_protos, without_comments
from tools.proto_rules import breaking, lint

NOW = read_protos()


def message(files: FileDescriptorSet, name: str) -> DescriptorProto:
    return next(message for file in files.file for message in file.message_type if message.name == name)


def changed(change: Callable[[FileDescriptorSet], object]) -> FileDescriptorSet:
    files = FileDescriptorSet()
    files.CopyFrom(NOW)
    change(files)
    return files


def first_method_becomes_a_stream(files: FileDescriptorSet) -> None:
    files.file[0].service[0].method[0].server_streaming = True


def zero_values_have_other_names(files: FileDescriptorSet) -> None:
    for file in files.file:
        for enum in file.enum_type:
            enum.value[0].name = "NONE"


def field_goes(files: FileDescriptorSet, *, is_reserved: bool) -> None:
    request = message(files, "GenerateRequest")
    index = next(index for index, field in enumerate(request.field) if field.name == "priority")
    field = request.field[index]
    if is_reserved:
        request.reserved_range.add(start=field.number, end=field.number + 1)
        request.reserved_name.append(field.name)
    del request.field[index]


def test_the_messages_follow_the_rules() -> None:
    assert lint(NOW) == []


def test_nothing_has_changed_that_clients_were_built_with() -> None:
    assert accepted().file, "something was accepted"
    assert breaking(accepted(), NOW) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda files: setattr(message(files, "Usage"), "name", "usage_count"), "a message's name is PascalCase"),
        (lambda files: setattr(message(files, "Usage").field[0], "name", "promptTokens"), "is lower_snake_case"),
        (lambda files: setattr(files.file[0].service[0], "name", "Admin"), "ends with Service"),
        (
            lambda files: setattr(files.file[0].service[0].method[0], "output_type", ".raypd.v1.Usage"),
            "is .raypd.v1.Usage",
        ),
        (lambda files: setattr(files.file[0], "package", "raypd"), "is not lower case with a version"),
        (zero_values_have_other_names, "UNSPECIFIED"),
        (lambda files: files.file[0].ClearField("source_code_info"), "has no comment"),
    ],
)
def test_what_breaks_a_rule_is_found(change: Callable[[FileDescriptorSet], object], problem: str) -> None:
    assert any(problem in found for found in lint(changed(change)))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda files: field_goes(files, is_reserved=False), "GenerateRequest.priority: is gone, and its number 7"),
        (
            lambda files: setattr(message(files, "Usage").field[0], "type", FieldDescriptorProto.TYPE_STRING),
            "its type was",
        ),
        (lambda files: setattr(message(files, "Usage").field[0], "number", 99), "Usage.prompt_tokens: is gone"),
        (
            lambda files: setattr(message(files, "Usage").field[0], "label", FieldDescriptorProto.LABEL_REPEATED),
            "its label was",
        ),
        (
            lambda files: setattr(message(files, "GenerateRequest").oneof_decl[0], "name", "input"),
            "it was in oneof prompt",
        ),
        (lambda files: files.file[0].service[0].method.pop(), "is gone"),
        (first_method_becomes_a_stream, "its server_streaming was False and is True"),
        (lambda files: [enum.value.pop() for file in files.file for enum in file.enum_type], "is now gone"),
        (lambda files: files.file.pop(), "is gone"),
    ],
)
def test_a_change_that_clients_would_stumble_over_is_found(
    change: Callable[[FileDescriptorSet], object], problem: str
) -> None:
    assert any(problem in found for found in breaking(NOW, changed(change)))


def test_what_is_new_or_goes_in_good_order_breaks_nothing() -> None:
    def grow(files: FileDescriptorSet) -> None:
        message(files, "Usage").field.add(name="more", number=99, type=FieldDescriptorProto.TYPE_BOOL)
        files.file[0].message_type.add(name="Fresh")
        field_goes(files, is_reserved=True)

    assert breaking(without_comments(NOW), changed(grow)) == []
