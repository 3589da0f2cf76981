"""Which engine a worker runs: the options of `preble worker` that concern it, and the engine they ask for.

Owns the options' meaning and every refusal of a combination; starts nothing but the engine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engines.base import Engine
from ..errors import InvalidConfig

if TYPE_CHECKING:
    from ..engines.admission import AdmissionConfig
    from ..local import LocalConfig

ENGINES = ("torch", "sglang", "vllm", "attached", "simulated")
# Options with a usual value, by the one engine that they are for: of others they say nothing.
_USUAL = {"dtype": "auto", "device": "auto", "cost_model": "mistral-7b/a6000", "time_scale": 1.0}
_ONLY_FOR = dict.fromkeys(("dtype", "device", "threads", "max_model_tokens"), "torch")
_ONLY_FOR |= dict.fromkeys(("cost_model", "time_scale"), "simulated")
_SIMULATED_KV_TOKENS = 200_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that concern the engine."""
    parser.add_argument("--engine", choices=ENGINES, required=True, help="what generates the tokens")
    parser.add_argument("--model", metavar="DIR", help="model directory in transformers format (torch, sglang, vllm)")
    parser.add_argument("--url", metavar="URL", help="a running SGLang or vLLM server (attached)")
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="argument of SGLang or vLLM as their own documentation names it, such as tp_size=4; repeatable",
    )
    batching = parser.add_argument_group("batching")
    batching.add_argument("--kv-capacity-tokens", type=int, metavar="N", help="KV cache size; default: what fits")
    batching.add_argument("--token-budget", type=int, metavar="N", help="tokens per iteration")
    batching.add_argument("--max-running", type=int, metavar="N", help="requests per iteration")
    batching.add_argument(
        "--order", choices=("priority", "fcfs", "longest_prefix"), help="which waiting request goes first"
    )
    batching.add_argument(
        "--eviction", choices=("returns", "lru"), help="which cached prefix goes first (torch, simulated; returns)"
    )
    batching.add_argument(
        "--look-ahead", type=int, metavar="N", help="requests that SGLang or vLLM may always hold without output (1)"
    )
    batching.add_argument(
        "--policy", metavar="NAME", help="which data-parallel rank of SGLang or vLLM: a name, or module:Class (e2)"
    )
    batching.add_argument(
        "--max-model-tokens", type=int, metavar="N", help="longest prompt + output (torch); default: the model's"
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--dtype", default=_USUAL["dtype"], choices=("auto", "float32", "bfloat16"), help="numbers (torch)"
    )
    machine.add_argument("--device", default=_USUAL["device"], choices=("auto", "cpu", "cuda"), help="device (torch)")
    machine.add_argument("--threads", type=int, metavar="N", help="CPU threads of the model (torch)")
    machine.add_argument("--cpu", type=int, metavar="N", help="pin this process to one CPU core")
    simulation = parser.add_argument_group("simulation")
    simulation.add_argument(
        "--cost-model", default=_USUAL["cost_model"], metavar="PRESET", help="or FILE.json: step times"
    )
    simulation.add_argument(
        "--time-scale",
        type=float,
        default=_USUAL["time_scale"],
        help="seconds slept per simulated second (%(default)s); 0: none",
    )


def make_engine(args: argparse.Namespace) -> Engine:
    """The engine that the options ask for. Raises `InvalidConfig`, `EngineError` or `MissingExtra`."""
    if args.url and args.engine != "attached":
        raise InvalidConfig(f"--url is for --engine attached, not {args.engine}")
    for name, engine in _ONLY_FOR.items():
        if getattr(args, name) != _USUAL.get(name) and args.engine != engine:
            raise InvalidConfig(f"{_flag(name)} is for --engine {engine}, not {args.engine}")
    if args.engine in ("sglang", "vllm"):
        return _streaming_engine(args)
    if args.engine_arg:
        raise InvalidConfig(f"--engine-arg is for --engine sglang and vllm, not {args.engine}")
    if args.engine == "attached":
        return _attached_engine(args)
    for name in ("look_ahead", "policy"):
        if getattr(args, name) is not None:
            raise InvalidConfig(f"{_flag(name)} is for engines that run by themselves, not {args.engine}")
    if args.engine == "simulated":
        return _simulated_engine(args)
    return _torch_engine(args)


def parse_engine_args(words: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE words as a table: numbers, true, false, null and JSON objects and lists by their look, else text.

    Dashes in a key count as underscores. Raises `InvalidConfig` for a word without "=", and for a key given twice.
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip().lstrip("-").replace("-", "_")
        if not equals or not key.isidentifier():
            raise InvalidConfig(f"--engine-arg must be KEY=VALUE, got {word!r}")
        if key in found:
            raise InvalidConfig(f"--engine-arg {key} is given twice")
        found[key] = _typed(key, text.strip())
    return found


def _typed(key: str, text: str) -> Any:
    if text.lower() in ("true", "false", "null", "none"):
        return {"true": True, "false": False}.get(text.lower())
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    if text[:1] in ("{", "[", '"'):
        try:
            return json.loads(text)
        except ValueError as error:
            raise InvalidConfig(f"--engine-arg {key} is no JSON: {error}") from None
    return text


def _streaming_engine(args: argparse.Namespace) -> Engine:
    if not args.model:
        raise InvalidConfig(f"--engine {args.engine} needs --model")
    _refuse_own_settings(args)
    arguments = parse_engine_args(args.engine_arg)
    config = _admission_config(args)
    from ..engines.async_engine import StreamingEngine

    if args.engine == "sglang":
        from ..engines.sglang import SglangBackend

        return StreamingEngine(SglangBackend(args.model, arguments), config)
    from ..engines.vllm import VllmBackend

    return StreamingEngine(VllmBackend(args.model, arguments), config)


def _attached_engine(args: argparse.Namespace) -> Engine:
    if not args.url:
        raise InvalidConfig("--engine attached needs --url http://host:port")
    if args.model:
        raise InvalidConfig("--model is not for --engine attached: the server says what it serves")
    _refuse_own_settings(args)
    from ..engines.async_engine import StreamingEngine
    from ..engines.attached import AttachedBackend

    return StreamingEngine(AttachedBackend(args.url), _admission_config(args), start_seconds=60.0)


def _refuse_own_settings(args: argparse.Namespace) -> None:
    for name in ("kv_capacity_tokens", "token_budget", "max_running", "eviction"):
        if getattr(args, name) is not None:
            raise InvalidConfig(f"{_flag(name)} is not for --engine {args.engine}: the engine's own arguments say it")


def _admission_config(args: argparse.Namespace) -> AdmissionConfig:
    from ..engines.admission import AdmissionConfig

    chosen = {name: getattr(args, name) for name in ("order", "look_ahead", "policy")}
    return AdmissionConfig(**{name: value for name, value in chosen.items() if value is not None})


def _simulated_engine(args: argparse.Namespace) -> Engine:
    from .._cost import CostModel
    from ..engines.simulated import SimulatedEngine
    from ..local import LocalConfig

    config = _local_config(args, LocalConfig(_SIMULATED_KV_TOKENS))
    assert config is not None
    return SimulatedEngine(CostModel.preset(args.cost_model), config, time_scale=args.time_scale)


def _torch_engine(args: argparse.Namespace) -> Engine:
    if not args.model:
        raise InvalidConfig("--engine torch needs --model DIR")
    if not Path(args.model).is_dir():
        raise InvalidConfig(f"--model {args.model}: no such directory")
    from ..engines.torch import TorchEngine

    return TorchEngine(
        args.model,
        local=_local_config(args),
        dtype=args.dtype,
        device=args.device,
        threads=args.threads,
        max_model_tokens=args.max_model_tokens,
    )


def _local_config(args: argparse.Namespace, default: LocalConfig | None = None) -> LocalConfig | None:
    """How the engine forms batches; None leaves all of it to the engine, which finds its own capacity."""
    from ..local import LocalConfig

    options = {name: getattr(args, name) for name in ("token_budget", "max_running", "order", "eviction")}
    chosen = {name: value for name, value in options.items() if value is not None}
    if args.kv_capacity_tokens is not None:
        return LocalConfig(args.kv_capacity_tokens, **chosen)
    if default is not None:
        return replace(default, **chosen)
    if chosen:
        given = ", ".join(map(_flag, chosen))
        raise InvalidConfig(f"{given} with this engine needs --kv-capacity-tokens, too")
    return None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
