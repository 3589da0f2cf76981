"""Real SGLang and vLLM servers for the live tests: `launch_server` and `api_server`, as their users start them.

Owns processes and the model they serve: a tiny one whose chat template knows tools, so that tool definitions and tool
calls take part in the prompt.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.live.live_fleet import CAPACITY_TOKENS, ENGINES_DIR, ENVIRONMENT, LOGS, READY_SECONDS, model_dir, python_of
from tests.support.gateway import GatewayProcess

MODEL_NAME = "tiny"
BLOCK_SIZES = {"sglang": 16, "vllm": 32}
# Tools before the messages, calls and results in the tags that both engines' "hermes" parsers read.
TOOL_TEMPLATE = (
    "{{ bos_token }}{% if tools %}[tools] {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}[{{ message.role }}] {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def tools_model_dir() -> Path:
    """The tiny model with `TOOL_TEMPLATE`."""
    source, final = model_dir(), ENGINES_DIR / "models" / "llama-1m-tools"
    if not final.is_dir():
        building = final.with_name(f".{final.name}.{os.getpid()}")
        shutil.copytree(source, building)
        (building / "chat_template.jinja").write_text(TOOL_TEMPLATE)
        config = building / "tokenizer_config.json"
        content = json.loads(config.read_text())
        content.pop("chat_template", None)
        config.write_text(json.dumps(content, indent=1))
        building.rename(final)
    return final


def without_blanks() -> dict[str, int]:
    """A `logit_bias` against tokens of nothing but white space, of which a random model makes no end where JSON lets
    it."""
    tokenizer = Tokenizer.from_file(str(tools_model_dir() / "tokenizer.json"))
    return {str(token): -100 for token in range(tokenizer.get_vocab_size()) if tokenizer.decode([token]).isspace()}


def free_ports(count: int) -> list[int]:
    """So many ports that were free a moment ago."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class LiveServer:
    """One server, pinned to one core; `start`, `wait`, then `url` answers. `more`: options of its command, whose last
    word counts."""

    def __init__(self, engine: str, number: int, *more: str) -> None:
        self.engine, self.number, self.more = engine, number, more
        self.port, self.events_port, self.replay_port = free_ports(3)
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes]
        LOGS.mkdir(parents=True, exist_ok=True)
        self.log = LOGS / f"server-{engine}-{number}.log"

    def start(self) -> None:
        """Start the process."""
        cores = sorted(os.sched_getaffinity(0))
        core = cores[self.number % len(cores)]
        command = _sglang_command(self) if self.engine == "sglang" else _vllm_command(self)
        # The stand-ins for what SGLang has no build of were put into its environment by `install`.
        environment = {**os.environ, **ENVIRONMENT}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                ["taskset", "-c", str(core), *command, *self.more],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it answers; fails with the end of its log."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if _is_healthy(self.url):
                return
            time.sleep(0.2)
        raise AssertionError(f"{self.engine} did not get ready; {self.log} ends: {self.log.read_text()[-2000:]}")

    def kill(self) -> None:
        """End it and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30.0)


@dataclass
class Front:
    """Two servers of one engine and the gateway before them."""

    engine: str
    servers: list[LiveServer]
    gateway: GatewayProcess

    @property
    def direct(self) -> str:
        """The first server's own address."""
        return self.servers[0].url


@contextlib.contextmanager
def front_of(engine: str, log: Path) -> Iterator[Front]:
    """Both servers, then the gateway, which must end well."""
    servers = [LiveServer(engine, number) for number in range(2)]
    gateway = None
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        urls = [server.url for server in servers]
        gateway = GatewayProcess("--workers", *urls, "--tokenizer", str(tools_model_dir()), log=log)
        yield Front(engine, servers, gateway)
    finally:
        code = None if gateway is None else gateway.stop()
        for server in servers:
            server.kill()
    assert code == 0


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def post(url: str, body: Any) -> tuple[int, bytes]:
    """(status, bytes) of a JSON body sent as any client does."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120.0) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def _events(server: LiveServer, **more: Any) -> str:
    config = {"publisher": "zmq", "endpoint": f"tcp://*:{server.events_port}"}
    return json.dumps({**config, "replay_endpoint": f"tcp://127.0.0.1:{server.replay_port}", **more})


def _sglang_command(server: LiveServer) -> list[str]:
    command = [str(python_of("sglang")), "-m", "sglang.launch_server", "--model-path", str(tools_model_dir())]
    command += ["--host", "127.0.0.1", "--port", str(server.port), "--served-model-name", MODEL_NAME]
    command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    command += ["--disable-cuda-graph", "--disable-overlap-schedule", "--mem-fraction-static", "0.3"]
    command += ["--dtype", "float32", "--page-size", str(BLOCK_SIZES["sglang"]), "--context-length", "4096"]
    command += ["--max-total-tokens", str(2 * CAPACITY_TOKENS), "--max-running-requests", "8"]
    command += ["--tool-call-parser", "qwen25", "--enable-cache-report", "--enable-metrics"]
    return [*command, "--kv-events-config", _events(server)]


def _vllm_command(server: LiveServer) -> list[str]:
    command = [str(python_of("vllm")), "-m", "vllm.entrypoints.openai.api_server", "--model", str(tools_model_dir())]
    command += ["--host", "127.0.0.1", "--port", str(server.port), "--served-model-name", MODEL_NAME]
    command += ["--dtype", "float32", "--block-size", str(BLOCK_SIZES["vllm"]), "--max-model-len", "4096"]
    command += ["--max-num-seqs", "8", "--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    command += ["--num-gpu-blocks-override", str(2 * CAPACITY_TOKENS // BLOCK_SIZES["vllm"] + 1)]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    return [*command, "--kv-events-config", _events(server, enable_kv_cache_events=True)]
