"""Tiny models: complete, repeatable, cached, and with a tokenizer that gives every text back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.register_assert_rewrite("tests.support.torch_fixtures")
pytest_plugins = ["tests.support.torch_fixtures"]

from preble import cli  # noqa: E402
from preble.engines.torch import tiny_models  # noqa: E402
from preble.engines.torch.tiny_models import (  # noqa: E402
    SPECS,
    corpus,
    make_tiny_model,
    make_tiny_model_at,
    stdlib_directory,
    train_tokenizer,
)
from preble.errors import EngineError, InvalidInput  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(tiny_model_dir)


def test_a_made_model_loads_in_transformers_with_the_shape_of_its_spec(tiny_model_dir: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    spec, config = SPECS["llama-1m"], model.config
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.vocab_size, config.num_hidden_layers, config.head_dim) == (
        spec.vocab_size,
        spec.layers,
        spec.head_dim,
    )
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(1.1e6, rel=0.1)


def test_the_demo_model_has_about_20_million_parameters() -> None:
    spec = SPECS["llama-20m"]
    attention = spec.hidden_size * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    total = spec.layers * (attention + mlp) + 2 * spec.vocab_size * spec.hidden_size
    assert total == pytest.approx(20e6, rel=0.05)


def test_the_same_seed_gives_the_same_files_and_another_seed_other_weights(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    torch.manual_seed(99)  # the surroundings must not matter
    state = torch.get_rng_state()
    again, other = make_tiny_model("llama-1m", tmp_path), make_tiny_model("llama-1m", tmp_path, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (tiny_model_dir / name).read_bytes(), name
    assert (other / "model.safetensors").read_bytes() != (again / "model.safetensors").read_bytes()
    assert (other / "tokenizer.json").read_bytes() == (again / "tokenizer.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama-1m-seed0", "llama-1m-seed1"]


def test_a_model_that_exists_is_not_made_again(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_models, "_write_model", lambda *_: pytest.fail("made again"))
    assert make_tiny_model("llama-1m", tiny_model_dir.parent) == tiny_model_dir


def test_a_maker_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(spec: object, path: Path, seed: int) -> None:
        (path / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_models, "_write_model", break_off)
    with pytest.raises(KeyboardInterrupt):
        make_tiny_model("llama-1m", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_of_two_makers_at_once_the_first_wins_and_both_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_maker_finishes_first(spec: object, path: Path, seed: int) -> None:
        (path / "late").touch()
        final = tmp_path / "llama-1m-seed0"
        final.mkdir()
        (final / "early").touch()

    monkeypatch.setattr(tiny_models, "_write_model", other_maker_finishes_first)
    made = make_tiny_model("llama-1m", tmp_path)
    assert [path.name for path in made.iterdir()] == ["early"]
    assert list(tmp_path.iterdir()) == [made]


def test_an_unknown_spec_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="llama-1m.*llama-20m.*'llama-7b'"):
        make_tiny_model("llama-7b", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match="file"):
        make_tiny_model("llama-1m", tmp_path / "file")


@given(text=st.text(max_size=60))
def test_the_tokenizer_gives_every_text_back(tokenizer: transformers.PreTrainedTokenizerBase, text: str) -> None:
    # Characters of the special tokens' names could spell one of them; nothing else is special.
    text = text.replace("<|", "< |")
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert all(0 <= token < SPECS["llama-1m"].vocab_size for token in token_ids)
    assert tokenizer.decode(token_ids, clean_up_tokenization_spaces=False) == text


def test_the_tokenizer_has_learned_from_python_source(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    text = (stdlib_directory() / "argparse.py").read_text(encoding="utf-8")[:5000]
    assert len(tokenizer.encode(text)) < len(text) / 2.5
    assert len(tokenizer) == SPECS["llama-1m"].vocab_size


def test_chats_that_share_their_first_turns_share_their_first_tokens(
    tokenizer: transformers.PreTrainedTokenizerBase,
) -> None:
    turns = [{"role": "system", "content": "Answer from the document."}, {"role": "user", "content": "What is E2?"}]
    short = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    longer = [*turns, {"role": "assistant", "content": "A rule."}, {"role": "user", "content": "Why?"}]
    assert short.startswith("<|begin|>[system] Answer") and short.endswith("[assistant] ")
    assert tokenizer.apply_chat_template(longer, tokenize=False).startswith(short)


def test_the_corpus_is_bounded_and_leaves_installed_packages_out() -> None:
    assert sum(map(len, corpus(10_000))) == 10_000
    texts = list(corpus(1 << 40))
    assert 5_000_000 < sum(map(len, texts)) < 100_000_000
    packages = list((stdlib_directory() / "site-packages").glob("*.py"))
    assert all(
        path.read_text(encoding="utf-8", errors="replace") not in texts for path in packages if path.stat().st_size
    )


def test_a_library_too_small_for_the_vocabulary_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_models, "corpus", lambda bytes_max: iter(["def f(): return 1\n"]))
    with pytest.raises(EngineError, match="2048 are needed"):
        train_tokenizer(SPECS["llama-1m"])


def test_making_a_model_without_torch_names_the_remedy(run_python: Any, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from preble.engines.torch.tiny_models import make_tiny_model\n"
        "from preble.errors import MissingExtra\n"
        f"try:\n    make_tiny_model('llama-1m', {str(tmp_path)!r})\n"
        "except MissingExtra as error:\n    sys.exit(str(error))\n"
    )
    assert run_python("-c", code).stderr.strip() == 'the torch engine needs torch: pip install "preble[torch]"'
    assert list(tmp_path.iterdir()) == []


def test_the_config_is_plain_json_without_machine_paths(tiny_model_dir: Path) -> None:
    text = (tiny_model_dir / "config.json").read_text()
    json.loads(text)
    assert "/" not in text.replace("float32", "")


def test_the_command_makes_a_model_where_it_is_reported_to_and_touches_nothing_that_is_there(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "some" / "tiny"
    assert cli.main(["tiny-model", str(made)]) == 0
    assert capsys.readouterr().out == f"{made}\n"
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert (made / name).read_bytes() == (tiny_model_dir / name).read_bytes(), name
    (made / "config.json").unlink()
    assert cli.main(["tiny-model", str(made), "--seed", "1"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert not (made / "config.json").exists() and list(made.parent.iterdir()) == [made]


def test_a_model_at_a_place_needs_a_known_spec(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="llama-1m"):
        make_tiny_model_at("llama-7b", tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
