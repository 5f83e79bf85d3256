"""Rules of what a .proto has to be like, and of what must not change in it: those of buf's STANDARD lint and of its
FILE breaking check that concern raypd.v1, over protobuf's own descriptors.

Within a package's version nothing that a client was built against goes away or changes its meaning: fields, methods,
enum values and their numbers stay. What is removed is reserved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

_PASCAL: Final = re.compile(r"^[A-Z][A-Za-z0-9]*$")
_SNAKE: Final = re.compile(r"^[a-z][a-z0-9]*(_[a-z0-9]+)*$")
# Field numbers in descriptor.proto, which paths of comments are made of.
_MESSAGE, _ENUM, _SERVICE, _FIELD, _NESTED, _NESTED_ENUM, _VALUE, _METHOD = 4, 5, 6, 2, 3, 4, 2, 2


def lint(files: FileDescriptorSet) -> list[str]:
    """Return what breaks the rules, as `file: name: what`; needs the source's comments (--include_source_info)."""
    return [f"{file.name}: {problem}" for file in files.file for problem in _Lint(file).problems()]


class _Lint:
    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._commented = {
            tuple(location.path)
            for location in file.source_code_info.location
            if location.leading_comments.strip() or location.trailing_comments.strip()
        }

    def problems(self) -> Iterator[str]:
        package, directory = self._file.package, self._file.name.rpartition("/")[0]
        if not re.fullmatch(r"([a-z][a-z0-9]*\.)+v[1-9][0-9]*", package):
            yield f"package {package} is not lower case with a version"
        if directory != package.replace(".", "/"):
            yield f"package {package} is in directory {directory}"
        if self._file.syntax != "proto3":
            yield "syntax is not proto3"
        for index, service in enumerate(self._file.service):
            yield from self._service(service, (_SERVICE, index))
        for index, message in enumerate(self._file.message_type):
            yield from self._message(message, (_MESSAGE, index), message.name)
        for index, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (_ENUM, index), enum.name)

    def _comment(self, path: tuple[int, ...], name: str) -> Iterator[str]:
        if path not in self._commented:
            yield f"{name}: has no comment"

    def _service(self, service: ServiceDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield from self._comment(path, service.name)
        if not (_PASCAL.match(service.name) and service.name.endswith("Service")):
            yield f"{service.name}: a service's name is PascalCase and ends with Service"
        for index, method in enumerate(service.method):
            name = f"{service.name}.{method.name}"
            yield from self._comment((*path, _METHOD, index), name)
            if not _PASCAL.match(method.name):
                yield f"{name}: a method's name is PascalCase"
            for kind, message in (("Request", method.input_type), ("Response", method.output_type)):
                if message.rpartition(".")[2] != f"{method.name}{kind}":
                    yield f"{name}: its {kind.lower()} is {message}, not {method.name}{kind}"

    def _message(self, message: DescriptorProto, path: tuple[int, ...], name: str) -> Iterator[str]:
        if message.options.map_entry:
            return  # protoc's own, for a map
        yield from self._comment(path, name)
        if not _PASCAL.match(message.name):
            yield f"{name}: a message's name is PascalCase"
        for index, field in enumerate(message.field):
            yield from self._comment((*path, _FIELD, index), f"{name}.{field.name}")
            if not _SNAKE.match(field.name):
                yield f"{name}.{field.name}: a field's name is lower_snake_case"
        for oneof in message.oneof_decl:
            if not _SNAKE.match(oneof.name.lstrip("_")):
                yield f"{name}.{oneof.name}: a oneof's name is lower_snake_case"
        for index, nested in enumerate(message.nested_type):
            yield from self._message(nested, (*path, _NESTED, index), f"{name}.{nested.name}")
        for index, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, _NESTED_ENUM, index), f"{name}.{enum.name}")

    def _enum(self, enum: EnumDescriptorProto, path: tuple[int, ...], name: str) -> Iterator[str]:
        yield from self._comment(path, name)
        prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
        for index, value in enumerate(enum.value):
            yield from self._comment((*path, _VALUE, index), f"{name}.{value.name}")
            if not value.name.startswith(prefix):
                yield f"{name}.{value.name}: a value's name begins with {prefix}"
            if value.number == 0 and value.name != prefix + "UNSPECIFIED":
                yield f"{name}.{value.name}: the zero value is {prefix}UNSPECIFIED"


def breaking(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """Return what clients that were built against `old` would stumble over in `new`."""
    new_files = {file.name: file for file in new.file}
    problems = []
    for file in old.file:
        if file.name not in new_files:
            problems.append(f"{file.name}: is gone")
            continue
        problems += [f"{file.name}: {problem}" for problem in _changes(file, new_files[file.name])]
    return problems


def _changes(old: FileDescriptorProto, new: FileDescriptorProto) -> Iterator[str]:
    if old.package != new.package:
        yield f"package was {old.package} and is {new.package}"
    messages, enums = (
        {message.name: message for message in new.message_type},
        {enum.name: enum for enum in new.enum_type},
    )
    services = {service.name: service for service in new.service}
    for service in old.service:
        yield from _service_changes(service, services.get(service.name))
    for message in old.message_type:
        yield from _message_changes(message, messages.get(message.name), message.name)
    for enum in old.enum_type:
        yield from _enum_changes(enum, enums.get(enum.name), enum.name)


def _service_changes(old: ServiceDescriptorProto, new: ServiceDescriptorProto | None) -> Iterator[str]:
    if new is None:
        yield f"{old.name}: is gone"
        return
    methods = {method.name: method for method in new.method}
    for method in old.method:
        name, now = f"{old.name}.{method.name}", methods.get(method.name)
        if now is None:
            yield f"{name}: is gone"
            continue
        for what in ("input_type", "output_type", "client_streaming", "server_streaming"):
            if getattr(method, what) != getattr(now, what):
                yield f"{name}: its {what} was {getattr(method, what)} and is {getattr(now, what)}"


def _message_changes(old: DescriptorProto, new: DescriptorProto | None, name: str) -> Iterator[str]:
    if new is None:
        yield f"{name}: is gone"
        return
    fields = {field.number: field for field in new.field}
    reserved = {number for span in new.reserved_range for number in range(span.start, span.end)}
    for field in old.field:
        now = fields.get(field.number)
        if now is not None:
            yield from _field_changes(field, now, name, _oneof(old, field), _oneof(new, now))
        elif field.number not in reserved or field.name not in new.reserved_name:
            yield f"{name}.{field.name}: is gone, and its number {field.number} and name are not reserved"
    nested, enums = {message.name: message for message in new.nested_type}, {enum.name: enum for enum in new.enum_type}
    for message in old.nested_type:
        yield from _message_changes(message, nested.get(message.name), f"{name}.{message.name}")
    for enum in old.enum_type:
        yield from _enum_changes(enum, enums.get(enum.name), f"{name}.{enum.name}")


def _field_changes(
    old: FieldDescriptorProto, new: FieldDescriptorProto, message: str, old_oneof: str, new_oneof: str
) -> Iterator[str]:
    name = f"{message}.{old.name}"
    for what in ("name", "type", "type_name", "label", "json_name", "proto3_optional"):
        if getattr(old, what) != getattr(new, what):
            yield f"{name}: its {what} was {getattr(old, what)} and is {getattr(new, what)}"
    if old_oneof != new_oneof:
        yield f"{name}: it was in oneof {old_oneof or 'none'} and is in {new_oneof or 'none'}"


def _oneof(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    return message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""


def _enum_changes(old: EnumDescriptorProto, new: EnumDescriptorProto | None, name: str) -> Iterator[str]:
    if new is None:
        yield f"{name}: is gone"
        return
    names = {value.number: value.name for value in new.value}
    for value in old.value:
        if names.get(value.number) != value.name:
            yield f"{name}.{value.name}: its number {value.number} is now {names.get(value.number, 'gone')}"
