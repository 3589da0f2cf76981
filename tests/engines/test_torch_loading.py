"""Every kind of model directory the torch engine takes equals transformers, and every kind it cannot run is refused
by name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.register_assert_rewrite("tests.support.torch_fixtures")
pytest_plugins = ["tests.support.torch_fixtures"]

from preble.engines.torch import TorchEngine  # noqa: E402
from preble.engines.torch.attention import (  # noqa: E402
    CPU_GATHER_TOKENS_MAX,
    CUDA_GATHER_TOKENS_MAX,
    KvPool,
    group_by_length,
    plan_last_rows,
)
from preble.engines.torch.loading import choose_device, choose_dtype, load_model  # noqa: E402
from preble.errors import EngineError, InvalidConfig  # noqa: E402
from preble.local import BatchItem, LocalConfig  # noqa: E402
from tests.support.torch_fixtures import Driver, Reference, greedy, joined, prompt  # noqa: E402

VOCAB_SIZE = 96
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

STRETCHED_ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}

# name -> (config class, fields beyond SHAPE)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama with every head its own key": ("LlamaConfig", {"num_key_value_heads": 6}),
    "llama with one key head": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama with tied embeddings": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama with wide heads": ("LlamaConfig", {"head_dim": 32}),
    "llama with biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama with one layer": ("LlamaConfig", {"num_hidden_layers": 1}),
    "llama with gelu": ("LlamaConfig", {"hidden_act": "gelu"}),
    "llama with linear rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", **STRETCHED_ROPE}}),
    "llama with yarn rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "yarn", **STRETCHED_ROPE}}),
    "llama with dynamic rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", **STRETCHED_ROPE}}),
    "llama with llama3 rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "mistral without a window": ("MistralConfig", {"sliding_window": None}),
    "mistral with a window as long as the context": ("MistralConfig", {"sliding_window": 256}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
}


def make_model(directory: Path, config_class: str, fields: dict[str, Any], **save: Any) -> Path:
    """A model of random weights, biases and norms in transformers format."""
    config = getattr(transformers, config_class)(**{**SHAPE, **fields})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.add_(0.3 * torch.randn_like(weight))
        model.save_pretrained(directory, **save)
    return directory


@pytest.fixture
def llama_dir(tmp_path: Path) -> Path:
    return make_model(tmp_path / "small-llama", "LlamaConfig", {})


def small_engine(path: Path, **options: Any) -> TorchEngine:
    return TorchEngine(
        path, local=LocalConfig(kv_capacity_tokens=300, token_budget=9), dtype="float32", device="cpu", **options
    )


def assert_equals_transformers(path: Path) -> None:
    """Chunked, batched and with a prefix hit, greedy output is that of transformers."""
    reference, driver = Reference(path), Driver(small_engine(path))
    first, second = prompt(1, 40, VOCAB_SIZE), joined(prompt(1, 30, VOCAB_SIZE), prompt(2, 8, VOCAB_SIZE))
    driver.submit("first", first, greedy(10))
    driver.submit("short", prompt(3, 2, VOCAB_SIZE), greedy(10))
    driver.run()
    assert driver.ask("second", second, greedy(10)).cached_tokens == 30
    assert driver.answers["first"].token_ids == reference.greedy(first, 10)
    assert driver.answers["short"].token_ids == reference.greedy(prompt(3, 2, VOCAB_SIZE), 10)
    assert driver.answers["second"].token_ids == reference.greedy(second, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_equals_transformers(tmp_path: Path, kind: str) -> None:
    assert_equals_transformers(make_model(tmp_path / "model", *KINDS[kind]))


def test_sharded_weights_equal_transformers(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", "LlamaConfig", {}, max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    assert_equals_transformers(path)


def test_weights_saved_in_bfloat16_load_into_float32(llama_dir: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.bfloat16)
    model.save_pretrained(llama_dir)
    assert_equals_transformers(llama_dir)


# --- limits of the context --------------------------------------------------------------------------------------------


def test_a_sliding_window_shorter_than_the_context_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = make_model(tmp_path / "windowed", "MistralConfig", {"sliding_window": 64})
    with pytest.raises(EngineError, match=r"windowed.*window of 64.*context of 256.*max_model_tokens=64"):
        small_engine(path)
    engine = small_engine(path, max_model_tokens=64)
    assert engine.info.max_model_tokens == 64
    assert Driver(engine).ask("r", prompt(1, 50, VOCAB_SIZE), greedy(14)).token_ids == Reference(path).greedy(
        prompt(1, 50, VOCAB_SIZE), 14
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_that_changes_with_length_is_run_only_where_it_does_not(tmp_path: Path, rope: dict[str, Any]) -> None:
    rope = {**rope, "rope_theta": 1e4, "original_max_position_embeddings": 60}
    path = make_model(tmp_path / "model", "LlamaConfig", {"rope_parameters": rope})
    engine = small_engine(path)
    assert engine.info.max_model_tokens == 60
    answer = Driver(engine).ask("r", prompt(1, 45, VOCAB_SIZE), greedy(30))
    assert answer.token_ids == Reference(path).greedy(prompt(1, 45, VOCAB_SIZE), 15)


@pytest.mark.parametrize(("asked", "given"), [(None, 256), (100, 100), (1000, 256)])
def test_the_context_is_what_was_asked_within_what_the_model_allows(
    llama_dir: Path, asked: int | None, given: int
) -> None:
    assert small_engine(llama_dir, max_model_tokens=asked).info.max_model_tokens == given


# --- refusals ---------------------------------------------------------------------------------------------------------


def edit_config(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))


def remove_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def truncate_weights(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def drop_one_weight(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


BREAKAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no directory": (shutil.rmtree, "does not exist"),
    "no config": (lambda path: (path / "config.json").unlink(), "no readable config.json"),
    "config that is not JSON": (lambda path: (path / "config.json").write_text("{,"), "not JSON"),
    "config that is no object": (lambda path: (path / "config.json").write_text("[1]"), "architectures"),
    "another architecture": (lambda path: edit_config(path, architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
    "quantised weights": (lambda path: edit_config(path, quantization_config={"quant_method": "gptq"}), "quantised"),
    "no weights": (remove_weights, "cannot load"),
    "truncated weights": (truncate_weights, "cannot load"),
    "a weight missing": (drop_one_weight, "missing keys.*up_proj"),
    "weights of another shape": (lambda path: edit_config(path, intermediate_size=96), "small-llama"),
    "an impossible shape": (lambda path: edit_config(path, num_attention_heads=7, head_dim=None), "small-llama"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_directory_is_refused_and_its_path_named(llama_dir: Path, breakage: str) -> None:
    damage, message = BREAKAGES[breakage]
    damage(llama_dir)
    with pytest.raises(EngineError, match=message) as caught:
        small_engine(llama_dir)
    assert str(llama_dir) in str(caught.value)


def test_a_missing_tokenizer_is_an_unknown_fingerprint(llama_dir: Path) -> None:
    assert small_engine(llama_dir).info.tokenizer_fingerprint == ""


def test_several_end_of_sequence_tokens_come_from_the_generation_config(llama_dir: Path) -> None:
    (llama_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert small_engine(llama_dir).info.eos_token_ids == (5, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype.*float16"),
        ({"device": "tpu"}, "device.*tpu"),
        ({"device": "cuda:x"}, "device.*cuda:x"),
        ({"threads": 0}, "threads"),
        ({"max_model_tokens": 1}, "max_model_tokens"),
    ],
)
def test_wrong_options_are_refused_by_name(llama_dir: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        TorchEngine(llama_dir, local=LocalConfig(kv_capacity_tokens=16), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_is_refused_and_auto_means_cpu() -> None:
    with pytest.raises(EngineError, match="cuda"):
        choose_device("cuda")
    assert choose_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"avx512_f": True, "amx_bf16": False}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_auto_dtype_is_bfloat16_only_where_the_cpu_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], expected: Any
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert choose_dtype("auto", torch.device("cpu")) == expected


def test_a_pool_that_does_not_fit_is_an_error_with_its_size(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*arguments: Any) -> Any:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("preble.engines.torch.runner.KvPool", no_memory)
    with pytest.raises(EngineError, match="cannot allocate a KV pool of 300 tokens .76800 bytes."):
        small_engine(llama_dir)


def test_loading_leaves_progress_bars_as_they_were(llama_dir: Path) -> None:
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    load_model(llama_dir, device=torch.device("cpu"), dtype=torch.float32)
    assert logging.is_progress_bar_enabled() == before


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_importing_the_engine_without_its_packages_names_the_remedy(run_python: Any, package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from preble.errors import MissingExtra\n"
        "try:\n    from preble.engines.torch import TorchEngine\n"
        "except MissingExtra as error:\n    sys.exit(str(error))\n"
    )
    assert run_python("-c", code).stderr.strip() == f'the torch engine needs {package}: pip install "preble[torch]"'


def test_the_engine_protocol_needs_no_torch(run_python: Any) -> None:
    code = "import sys, preble.engines.base, preble.engines.torch.tiny_models; sys.exit('torch' in sys.modules)"
    assert run_python("-c", code).returncode == 0


# --- parts ------------------------------------------------------------------------------------------------------------


def singles(*lengths: int) -> list[tuple[int, Any]]:
    return [(row, np.arange(length, dtype=np.int32)) for row, length in enumerate(lengths)]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_decode_groups_hold_every_row_once_and_waste_less_than_half(device_type: str) -> None:
    rng = np.random.default_rng(0)
    limit = CPU_GATHER_TOKENS_MAX if device_type == "cpu" else CUDA_GATHER_TOKENS_MAX
    for _ in range(50):
        lengths = (2 ** rng.uniform(0, 14, rng.integers(1, 40))).astype(int)
        groups = list(group_by_length(singles(*lengths), device_type))
        assert sorted(row for group in groups for row, _ in group) == list(range(len(lengths)))
        for group in groups:
            longest, shortest = len(group[0][1]), len(group[-1][1])
            assert 2 * shortest >= longest
            assert len(group) == 1 or len(group) * longest <= limit
    assert list(group_by_length([], device_type)) == []


def test_short_decodes_share_a_call_and_long_ones_on_cpu_do_not() -> None:
    assert len(list(group_by_length(singles(*[100] * 8), "cpu"))) == 1
    assert len(list(group_by_length(singles(*[2000] * 8), "cpu"))) == 8
    assert len(list(group_by_length(singles(*[2000] * 8), "cuda"))) == 1


def test_the_pool_gives_back_what_was_written_in_the_order_asked() -> None:
    pool = KvPool(2, 10, 2, 4, torch.float32, torch.device("cpu"))
    keys, values = torch.arange(24.0).view(3, 2, 4), -torch.arange(24.0).view(3, 2, 4)
    pool.write(1, torch.tensor([7, 0, 3]), keys, values)
    got_keys, got_values = pool.gather(1, torch.tensor([3, 7, 5], dtype=torch.int32))
    assert torch.equal(got_keys, torch.stack((keys[2], keys[0], torch.zeros(2, 4))))
    assert torch.equal(got_values, torch.stack((values[2], values[0], torch.zeros(2, 4))))
    assert not pool.keys[0].any(), "another layer was written"
    longer, _ = pool.gather(1, torch.tensor([0] * 9))
    assert torch.equal(longer, keys[1].expand(9, -1, -1))


def test_padding_never_reads_another_requests_kv() -> None:
    """A request whose numbers overflowed must not spoil its neighbours: zero times NaN is NaN."""
    pool = KvPool(1, 20, 1, 4, torch.float32, torch.device("cpu"))
    pool.keys.fill_(float("nan"))
    pool.values.fill_(float("nan"))
    own = {"long": np.arange(1, 9, dtype=np.int32), "short": np.arange(10, 15, dtype=np.int32)}
    slots = torch.tensor(np.concatenate(list(own.values())), dtype=torch.int64)
    pool.write(0, slots, torch.randn(13, 1, 4), slots[:, None, None].expand(-1, 1, 4).float())
    items = [
        BatchItem(name, len(context) - 1, context[-1:], context[-1:], context, samples=True, is_decode=True)
        for name, context in own.items()
    ]
    plan = plan_last_rows(items, torch.float32, torch.device("cpu"))
    attended = plan.attend(pool, 0, torch.zeros(2, 3, 4))  # no preference: the mean of the context's values
    for row, context in enumerate(own.values()):
        assert torch.allclose(attended[row], torch.full((3, 4), float(context.mean())))
