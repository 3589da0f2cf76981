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


class ChatTemplate:
    """A compiled chat template. Rendering changes nothing and may run in any thread. Raises `InvalidConfig`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            import jinja2
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise MissingExtra("chat templates need jinja2: pip install 'preble[gateway]'") from error
        if len(source) > TEMPLATE_BYTES_MAX:
            raise InvalidConfig(f"the chat template has {len(source)} characters, the limit is {TEMPLATE_BYTES_MAX}")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidConfig(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._template_error = jinja2.TemplateError

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt; `variables` are what else a template may read (`tools`, `documents`, a model's own); they go
        before `add_generation_prompt`. Raises `InvalidInput` where the template refuses the messages; it quotes none.
        """
        try:
            given = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
            text: str = self._template.render(
                {**self._special_tokens, **given, **(variables or {}), "messages": messages}
            )
            return text
        except _Refused as error:
            raise InvalidInput(f"messages: the model's chat template refuses them: {error}") from error
        except (self._template_error, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = type(error).__name__
            raise InvalidInput(f"messages: the model's chat template cannot render them ({kind})") from error
        except RecursionError:
            raise InvalidInput("messages: nested too deep for the model's chat template") from None


def load_chat_template(directory: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a model directory: chat_template.jinja, else the one in tokenizer_config.json (`config`).

    None where the model has none. Raises `InvalidConfig`.
    """
    file = directory / "chat_template.jinja"
    source = config.get("chat_template")
    if file.is_file():
        source = file.read_text(encoding="utf-8")
    elif isinstance(source, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise InvalidConfig(f"tokenizer_config.json in {directory}: chat_template must be text")
    return ChatTemplate(source, special_tokens(config))


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens of tokenizer_config.json (bos_token, eos_token, ...), as text."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


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
