"""What goes over the wire between a data plane and the endpoint picker: Envoy's messages of external processing
(envoy.service.ext_proc.v3), those of their fields that the picker reads or sets, and gRPC's health check. Owns the
numbers of fields, how answers are built, and how long the parts of a body are; decides nothing.

The messages are built when this is imported, in a pool of their own, out of the table `_MESSAGES`: no generated code,
which would tie the picker to one version of protobuf. Names of messages do not go over the wire, numbers do. Fields
that are not listed are passed over.
"""

from __future__ import annotations

from typing import Any

from ...errors import MissingExtra
from .parts import PART_BYTES, Said, passed_part

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
except ImportError as error:
    raise MissingExtra(f"the endpoint picker needs {error.name}: pip install 'preble[gateway,epp]'") from error

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH_SERVICE = "grpc.health.v1.Health"
# How a data plane sends a body (BodySendMode).
NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX = range(5)
SERVING, NOT_SERVING = 1, 2  # of a health check
# What a message is of (fields of `ProcessingRequest`).
REQUEST_HEADERS, RESPONSE_HEADERS, REQUEST_BODY, RESPONSE_BODY, REQUEST_TRAILERS, RESPONSE_TRAILERS = range(2, 8)
QUESTION_BODY, ANSWER_BODY = 3, 4  # fields of `ProcessingResponse`
_OVERWRITE = 2  # HeaderAppendAction OVERWRITE_IF_EXISTS_OR_ADD: a client's own header must not count
_PACKAGE = "preble.picker"
_STRUCT = "google.protobuf.Struct"

# By message: (name, number, type) of each field; "*" for a list, "=" for a map from names, "?" for one of several.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "HeaderValue": (("key", 1, "string"), ("value", 2, "string"), ("raw_value", 3, "bytes")),
    "HeaderMap": (("headers", 1, "*HeaderValue"),),
    "HeaderValueOption": (("header", 1, "HeaderValue"), ("append_action", 3, "int32")),
    "Metadata": (("filter_metadata", 1, f"={_STRUCT}"),),
    "ProtocolConfiguration": (("request_body_mode", 1, "int32"), ("response_body_mode", 2, "int32")),
    "HttpHeaders": (("headers", 1, "HeaderMap"), ("end_of_stream", 3, "bool")),
    "HttpBody": (("body", 1, "bytes"), ("end_of_stream", 2, "bool")),
    "HttpTrailers": (("trailers", 1, "HeaderMap"),),
    "ProcessingRequest": (
        ("request_headers", 2, "?HttpHeaders"),
        ("response_headers", 3, "?HttpHeaders"),
        ("request_body", 4, "?HttpBody"),
        ("response_body", 5, "?HttpBody"),
        ("request_trailers", 6, "?HttpTrailers"),
        ("response_trailers", 7, "?HttpTrailers"),
        ("metadata_context", 8, "Metadata"),
        ("observability_mode", 10, "bool"),
        ("protocol_config", 11, "ProtocolConfiguration"),
    ),
    "HeaderMutation": (("set_headers", 1, "*HeaderValueOption"), ("remove_headers", 2, "*string")),
    "StreamedBodyResponse": (("body", 1, "bytes"), ("end_of_stream", 2, "bool")),
    "BodyMutation": (("body", 1, "?bytes"), ("streamed_response", 3, "?StreamedBodyResponse")),
    "CommonResponse": (
        ("status", 1, "int32"),
        ("header_mutation", 2, "HeaderMutation"),
        ("body_mutation", 3, "BodyMutation"),
        ("clear_route_cache", 5, "bool"),
    ),
    "HeadersResponse": (("response", 1, "CommonResponse"),),
    "BodyResponse": (("response", 1, "CommonResponse"),),
    "TrailersResponse": (("header_mutation", 1, "HeaderMutation"),),
    "HttpStatus": (("code", 1, "int32"),),
    "ImmediateResponse": (
        ("status", 1, "HttpStatus"),
        ("headers", 2, "HeaderMutation"),
        ("body", 3, "bytes"),
        ("details", 5, "string"),
    ),
    "ProcessingResponse": (
        ("request_headers", 1, "?HeadersResponse"),
        ("response_headers", 2, "?HeadersResponse"),
        ("request_body", 3, "?BodyResponse"),
        ("response_body", 4, "?BodyResponse"),
        ("request_trailers", 5, "?TrailersResponse"),
        ("response_trailers", 6, "?TrailersResponse"),
        ("immediate_response", 7, "?ImmediateResponse"),
        ("dynamic_metadata", 8, _STRUCT),
    ),
    "HealthCheckRequest": (("service", 1, "string"),),
    "HealthCheckResponse": (("status", 1, "int32"),),
}  # fmt: skip


def _pool() -> descriptor_pool.DescriptorPool:
    """The messages of the table, in a pool of their own: a process may hold Envoy's own as well."""
    file = descriptor_pb2.FileDescriptorProto(name="preble_picker.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            _add_field(message, field, number, kind, f".{_PACKAGE}.{name}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return pool


def _add_field(message: Any, name: str, number: int, kind: str, owner: str) -> None:
    mark, kind = (kind[0], kind[1:]) if kind[0] in "*=?" else ("", kind)
    proto = descriptor_pb2.FieldDescriptorProto
    field = message.field.add(name=name, number=number, label=proto.LABEL_REPEATED if mark in "*=" and mark else 1)
    if mark == "=":
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", 1, "string", owner)
        _add_field(entry, "value", 2, kind, owner)
        field.type, field.type_name = proto.TYPE_MESSAGE, f"{owner}.{entry.name}"
        return
    if mark == "?":
        if not message.oneof_decl:
            message.oneof_decl.add(name="one")
        field.oneof_index = 0
    if kind in ("string", "bytes", "bool", "int32"):
        field.type = getattr(proto, f"TYPE_{kind.upper()}")
    else:
        field.type = proto.TYPE_MESSAGE
        field.type_name = f".{kind}" if "." in kind else f".{_PACKAGE}.{kind}"


_POOL = _pool()


def message_class(name: str) -> Any:
    """The class of a message of the table."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ProcessingRequest = message_class("ProcessingRequest")
ProcessingResponse = message_class("ProcessingResponse")
Metadata = message_class("Metadata")
HealthCheckRequest = message_class("HealthCheckRequest")
HealthCheckResponse = message_class("HealthCheckResponse")

Fields = list[tuple[bytes, bytes]]


# --- read -------------------------------------------------------------------------------------------------------------


def said_in(message: bytes) -> Said:
    """What an encoded `ProcessingRequest` says, however it is written. Raises `DecodeError` for what is none."""
    return said_by(ProcessingRequest.FromString(message))


def said_by(message: Any) -> Said:
    """The same of one that protobuf has read."""
    kind = message.WhichOneof("one")
    said = Said(0 if kind is None else message.DESCRIPTOR.fields_by_name[kind].number)
    said.is_observed = message.observability_mode
    if message.HasField("protocol_config"):
        config = message.protocol_config
        said.modes = config.request_body_mode, config.response_body_mode
    if message.HasField("metadata_context"):
        said.metadata = message.metadata_context.SerializeToString()
    if said.kind in (REQUEST_HEADERS, RESPONSE_HEADERS):
        head = getattr(message, kind)
        listed = head.headers.headers
        said.fields = [(one.key.encode(), one.raw_value or one.value.encode()) for one in listed]
        said.end = head.end_of_stream
    elif said.kind in (REQUEST_BODY, RESPONSE_BODY):
        part = getattr(message, kind)
        said.body, said.end = part.body, part.end_of_stream
    return said


def metadata_of(said: Said, namespace: str, key: str) -> Any:
    """One entry of the metadata that came with a message: text, a list of texts, or None where there is none. What is
    of another form is an empty list. Raises `DecodeError`."""
    if said.metadata is None:
        return None
    spaces = Metadata.FromString(said.metadata).filter_metadata
    if namespace not in spaces or key not in spaces[namespace].fields:
        return None
    value = spaces[namespace].fields[key]
    kind = value.WhichOneof("kind")
    if kind == "string_value":
        return value.string_value
    if kind == "list_value":
        return [one.string_value for one in value.list_value.values if one.HasField("string_value")]
    return []


# --- answers ----------------------------------------------------------------------------------------------------------


def set_field(mutation: Any, name: str, value: str) -> None:
    """Have a header set to a value, whatever it was."""
    option = mutation.set_headers.add(append_action=_OVERWRITE)
    option.header.key, option.header.raw_value = name, value.encode()


def go_on(kind: str) -> bytes:
    """The answer to a message of this kind that changes nothing."""
    answer = ProcessingResponse()
    getattr(answer, kind).SetInParent()
    return bytes(answer.SerializeToString())


def body_parts(kind: str, body: bytes, *, end: bool) -> list[bytes]:
    """A body in full duplex: one message for each part; at `end` the last one says that it is."""
    number, size = QUESTION_BODY if kind == "request_body" else ANSWER_BODY, len(body)
    if size <= PART_BYTES:
        return [passed_part(number, body, end)]
    starts = range(0, size, PART_BYTES)
    return [passed_part(number, body[at : at + PART_BYTES], end and at + PART_BYTES >= size) for at in starts]


def immediate(status: int, body: bytes, headers: dict[str, str], details: str) -> bytes:
    """The answer that ends a request: its client gets this."""
    answer = ProcessingResponse()
    response = answer.immediate_response
    response.status.code, response.body, response.details = status, body, details
    for name, value in headers.items():
        set_field(response.headers, name, value)
    return bytes(answer.SerializeToString())
