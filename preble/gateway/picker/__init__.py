"""The endpoint picker: an external processor (Envoy's ext_proc, over gRPC) that names a server for each request of a
gateway, as the Gateway API Inference Extension's protocol asks for (docs/endpoint-picker.md).

messages      what goes over the wire: messages, modes of bodies, answers
destinations  servers as the data plane names them, and which of them it allows
pick          one request: placed, booked, observed, ended
exchange      the order of messages: what is answered to each, when
turns         which request is placed when
server        the gRPC server and its health
"""
