"""Chat messages as prompt text, by the model's own Jinja template. Owns finding, compiling and running the template in
a sandbox; token ids are `tokenizing`'s.

The environment offers what model makers count on (the names are those of transformers): trimmed blocks, loop controls,
`raise_exception`, `strftime_now`, a `tojson` that escapes nothing, the `generation` tag, and the special tokens of
tokenizer_config.json by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ...errors import InvalidConfig, InvalidInput, MissingExtra

TEMPLATE_BYTES_MAX = 1 << 20
_HERE = "\ue000preble-goes-on-here\ue001"  # no text has it: private characters


class ChatTemplate:
    """A compiled chat template. Rendering changes nothing and may run in any thread. Raises `InvalidConfig`.

    `tool_source`: another template, for chats with tools, where a model has one. `takes_parts`: it goes through the
    parts of a message's content itself, and wants them as a list; else they must come as one text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        try:
            import jinja2
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise MissingExtra("chat templates need jinja2: pip install 'preble[gateway]'") from error
        for text in (source, tool_source or ""):
            if len(text) > TEMPLATE_BYTES_MAX:
                raise InvalidConfig(f"the chat template has {len(text)} characters, the limit is {TEMPLATE_BYTES_MAX}")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self._tool_template = self._template if tool_source is None else environment.from_string(tool_source)
            self.takes_parts = _goes_through_content(environment.parse(source))
        except jinja2.TemplateError as error:
            raise InvalidConfig(f"the chat template does not compile: {error}") from error
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        self._special_tokens = dict(special_tokens)
        self._template_error = jinja2.TemplateError

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt; `variables` are what else a template may read (`documents`, a model's own); they go before
        `add_generation_prompt`. `continue_final_message`: the prompt ends where the last message does, for the model
        to go on with it. Raises `InvalidInput` where the template refuses the messages; it quotes none.
        """
        if continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1] if messages else {})]
        given = {"tools": tools or None, "documents": None, "add_generation_prompt": add_generation_prompt}
        template = self._tool_template if given["tools"] else self._template
        try:
            text: str = template.render({**self._special_tokens, **given, **(variables or {}), "messages": messages})
        except _Refused as error:
            raise InvalidInput(f"messages: the model's chat template refuses them: {error}") from error
        except (self._template_error, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = type(error).__name__
            raise InvalidInput(f"messages: the model's chat template cannot render them ({kind})") from error
        except RecursionError:
            raise InvalidInput("messages: nested too deep for the model's chat template") from None
        return _up_to_mark(text) if continue_final_message else text


def load_chat_template(directory: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a model directory: chat_template.jinja, else the one in tokenizer_config.json (`config`).

    None where the model has none. Raises `InvalidConfig`.
    """
    file = directory / "chat_template.jinja"
    source, tool_source = config.get("chat_template"), None
    if file.is_file():
        source = file.read_text(encoding="utf-8")
    elif isinstance(source, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source, tool_source = named.get("default"), named.get("tool_use")
    if source is None:
        return None
    if not (isinstance(source, str) and isinstance(tool_source, str | None)):
        raise InvalidConfig(f"tokenizer_config.json in {directory}: chat_template must be text")
    return ChatTemplate(source, special_tokens(config), tool_source)


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens of tokenizer_config.json (bos_token, eos_token, ...), as text."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with a mark at the end of its text, and a blank, by which it shows whether the template trims."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": f"{content}{_HERE} "}
    parts = list(content) if isinstance(content, list) else []
    for i in range(len(parts) - 1, -1, -1):
        if isinstance(parts[i], Mapping) and isinstance(parts[i].get("text"), str):
            parts[i] = {**parts[i], "text": f"{parts[i]['text']}{_HERE} "}
            return {**message, "content": parts}
    raise InvalidInput("messages: the last one has no text that could be continued")


def _up_to_mark(text: str) -> str:
    before, found, after = text.rpartition(_HERE)
    if not found:
        raise InvalidInput("messages: the model's chat template leaves out the end of the last one")
    return before if after.startswith(" ") else before.rstrip()


def _goes_through_content(tree: Any) -> bool:
    """Whether a template has a loop over some message's `content`."""
    from jinja2 import nodes

    for loop in tree.find_all(nodes.For):
        over = loop.iter
        while isinstance(over, nodes.Filter) and over.node is not None:
            over = over.node
        if isinstance(over, nodes.Getattr) and over.attr == "content":
            return True
        if isinstance(over, nodes.Getitem) and isinstance(over.arg, nodes.Const) and over.arg.value == "content":
            return True
        if isinstance(over, nodes.Name) and over.name == "content":
            return True
    return False


class _Refused(Exception):
    """The template has called `raise_exception`; its text is the template's own."""


def _refuse(message: object) -> None:
    raise _Refused(str(message)[:200])


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _generation_tag() -> type:
    """`{% generation %}` marks what the assistant said, for training; here it shows its body and does nothing."""
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation
