"""What the gateway's tests share: a tokenizer for the simulated engine's ids, and `preble serve` as a process.

The tokenizer knows all 32,000 ids that the engine answers with. A prompt becomes one token a byte; an answer becomes
words, with characters that are spread over several tokens among them. No model library is needed.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tests.support.paths import ROOT
from tests.support.transport import HANG_SECONDS

VOCABULARY = 32_000
BOS, USER, END = "<|begin|>", "<|user|>", "<|end|>"
SPECIAL = (BOS, USER, END)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "<|user|>{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)
START_SECONDS = 120.0  # a start reads a tokenizer and a dozen libraries: long on a busy machine
HAN = "中文字"  # three bytes each


def byte_letters() -> list[str]:
    """The letter that stands for each byte, in the order of bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    others = (byte for byte in range(256) if byte not in letters)
    letters.update((byte, chr(256 + number)) for number, byte in enumerate(others))
    return [letters[byte] for byte in range(256)]


def make_tokenizer(directory: Path, *, template: str = TEMPLATE) -> Path:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `directory`."""
    letters = byte_letters()
    vocabulary = {letter: byte for byte, letter in enumerate(letters)}
    for token in range(256, VOCABULARY - len(SPECIAL)):
        if token % 3:
            text = f" w{token}".encode()
        else:  # the end of one character and the beginning of the next
            text = HAN[token % 2 + 1].encode()[1:] + HAN[token % 2].encode()[:1] + token.to_bytes(2, "big")
        piece = "".join(letters[byte] for byte in text)
        vocabulary[piece if piece not in vocabulary else f"{piece}{letters[32]}{token}"] = token
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": {"content": END, "special": True}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(template)
    return directory


def swap_letters(directory: Path, one: str, other: str) -> Path:
    """Let a tokenizer take one letter for the other."""
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(content))
    return directory


class GatewayProcess:
    """`preble serve ARGS...` on a free port, as a process. Ready when constructed. `prefix`: words before its
    command."""

    def __init__(
        self, *arguments: str, log: Path, environment: dict[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        command = [*prefix, sys.executable, "-m", "preble.cli", "serve", "--port", "0", "--lame-duck-seconds", "0"]
        command += arguments
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            )
        word, self.url = self._first_line().split()
        assert word == "READY"
        self.address = self.url.removeprefix("http://")
        self._admin_token = ""

    @property
    def admin_token(self) -> str:
        """What changes of the fleet need where there are no keys: the line after READY."""
        if not self._admin_token:
            word, self._admin_token = self._first_line().split()
            assert word == "ADMIN-TOKEN"
        return self._admin_token

    def _first_line(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], START_SECONDS)
        line = self.process.stdout.readline().decode() if ready else ""
        if not line:
            self.process.kill()
            raise AssertionError(f"not ready, exit code {self.process.wait()}: {self.log.read_text()[-2000:]}")
        return line

    def log_lines(self) -> list[dict[str, Any]]:
        """The log so far; every line must be JSON."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(HANG_SECONDS)
        finally:
            self.process.kill()
            if self.process.stdout is not None:
                self.process.stdout.close()


class Client:
    """One connection to a gateway, for what the `openai` client does not say."""

    def __init__(self, address: str, key: str | None = None) -> None:
        self.connection = http.client.HTTPConnection(address, timeout=HANG_SECONDS)
        self.headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """(status, headers, body) of one request; `body` is sent as JSON, or as it is where it is bytes."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        self.connection.request(method, path, data, {**self.headers, **(headers or {})})
        answer = self.connection.getresponse()
        raw = answer.read()
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.status, dict(answer.headers.items()), json.loads(raw) if is_json else raw.decode()

    def close(self) -> None:
        """Hang up."""
        self.connection.close()
