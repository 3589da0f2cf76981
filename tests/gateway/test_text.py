"""Text in and out of the gateway: characters and stop strings in streams, the tokenizer's parts, cache, pool and
templates. No socket, no process.
"""

from __future__ import annotations

import asyncio
import re
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.errors import InvalidConfig, InvalidInput, QueueFull
from preble.gateway.text import tokenizing
from preble.gateway.text.chat_template import ChatTemplate, load_chat_template
from preble.gateway.text.detokenizing import PENDING_TOKENS_MAX, UNFINISHED, Detokenizer, StopStrings
from preble.gateway.text.tokenizing import (
    FINE_CHARACTERS,
    LOOP_NEW_CHARACTERS,
    PartCache,
    PromptTooLong,
    TextCodec,
    _chunks,
    _line_end,
    first_difference,
)
from tests.support.gateway import BOS, END, HAN, SPECIAL, USER, VOCABULARY, make_tokenizer, swap_letters
from tests.support.transport import asynchronous

BYTES = st.lists(st.integers(0, 255), max_size=40)
TEXT = st.text(st.sampled_from(f"ab é{HAN}\U0001f469\n{UNFINISHED}"), max_size=20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer whose first 256 tokens are bytes."""
    return make_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def codec(model: Path) -> Any:
    """Its codec."""
    codec = TextCodec(model, threads=2)
    yield codec
    codec.close()


def streamed(codec: TextCodec, tokens: list[int], size: int = 1) -> list[str]:
    """The pieces of an output whose tokens come `size` at a time."""
    text = Detokenizer(codec.decode)
    return [text.add(tokens[i : i + size]) for i in range(0, len(tokens), size)] + [text.flush()]


# --- characters -------------------------------------------------------------------------------------------------------


@given(text=TEXT, size=st.integers(1, 5))
def test_a_stream_of_bytes_shows_whole_characters_as_soon_as_they_are(codec: TextCodec, text: str, size: int) -> None:
    pieces = streamed(codec, list(text.encode()), size)
    assert "".join(pieces) == text
    if UNFINISHED not in text:
        assert not any(UNFINISHED in piece for piece in pieces), "half a character was shown"


@given(tokens=BYTES, size=st.integers(1, 5))
def test_bytes_that_are_no_text_come_out_as_the_tokenizer_has_them(
    codec: TextCodec, tokens: list[int], size: int
) -> None:
    assert "".join(streamed(codec, tokens, size)) == codec.decode(tokens)


@given(tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=40))
def test_any_tokens_come_out_as_the_tokenizer_has_them(codec: TextCodec, tokens: list[int]) -> None:
    assert "".join(streamed(codec, tokens)) == codec.decode(tokens)


def test_what_can_be_cut_nowhere_is_held_for_a_bounded_time() -> None:
    text = Detokenizer(lambda ids: f"{len(ids)}{UNFINISHED}")  # no two parts of it make the whole
    pieces = [text.add([7]) for _ in range(PENDING_TOKENS_MAX)]
    assert pieces == [""] * (PENDING_TOKENS_MAX - 1) + [f"{PENDING_TOKENS_MAX}{UNFINISHED}"]


def test_bytes_that_never_become_a_character_do_not_wait_for_each_other(codec: TextCodec) -> None:
    text = Detokenizer(codec.decode)
    assert "".join(text.add([0xE4]) for _ in range(20)) == UNFINISHED * 19, "the last may still become one"


def test_a_token_that_shows_nothing_alone_keeps_what_comes_after_in_place(codec: TextCodec) -> None:
    begin = codec.encode_now("", True)[0]
    assert "".join(streamed(codec, [ord("a"), int(begin), ord("b")])) == "ab"


# --- stop strings -----------------------------------------------------------------------------------------------------


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
@settings(max_examples=400)
def test_a_stream_is_cut_where_the_whole_text_would_be(text: str, stops: list[str], cuts: list[int]) -> None:
    stopper = StopStrings(stops)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    shown = ""
    for start, end in zip(places, places[1:], strict=False):
        shown += stopper.add(text[start:end])
        rest = text[len(shown) :]
        assert stopper.matched or not any(stop in shown for stop in stops)
        assert text.startswith(shown)
        if stopper.matched:
            assert rest.startswith(stopper.matched)
            break
    if stopper.matched is None:
        shown += stopper.flush()
        assert shown == text
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    # Whoever sees the text piece by piece stops at the first stop string that is complete.
    assert (stopper.matched is not None) == bool(found)


def test_the_beginning_of_a_stop_string_is_held_back_and_shown_when_it_is_none() -> None:
    stopper = StopStrings(["STOP"])
    assert [stopper.add(piece) for piece in ("a S", "TO", "x ST", "OP b", "c")] == ["a ", "", "STOx ", "", ""]
    assert stopper.matched == "STOP"


# --- parts and their cache --------------------------------------------------------------------------------------------


def test_prompts_are_cut_at_special_tokens_and_parts_are_found_again(model: Path) -> None:
    codec = TextCodec(model, threads=1)
    first = f"{BOS}{USER}one{END}{USER}two{END}"
    codec.encode_now(first, False)
    assert (codec.counters.parts_found, codec.counters.parts_encoded) == (0, 5)
    more = codec.encode_now(f"{first}{USER}three{END}", False)
    assert (codec.counters.parts_found, codec.counters.parts_encoded) == (6, 6), "only what is new is tokenised"
    assert more.tolist() == codec._tokenizer.encode(f"{first}{USER}three{END}", add_special_tokens=False).ids
    codec.close()


@given(parts=st.lists(st.one_of(st.sampled_from(SPECIAL), TEXT), max_size=12))
def test_parts_are_the_whole(codec: TextCodec, parts: list[str]) -> None:
    text = "".join(parts)
    for framed in (False, True):
        whole = codec._tokenizer.encode(text, add_special_tokens=framed).ids
        if whole:
            assert codec.encode_now(text, framed).tolist() == whole
        else:
            with pytest.raises(InvalidInput, match="no tokens"):
                codec.encode_now(text, framed)


@asynchronous
async def test_a_chat_of_which_little_is_new_needs_no_thread(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = TextCodec(model, threads=1)
    waited: list[int] = []
    run = codec._queue.run

    async def counting(size: int, work: Any) -> Any:
        waited.append(size)
        return await run(size, work)

    monkeypatch.setattr(codec._queue, "run", counting)
    talk = [{"role": "user", "content": "a" * 3000}]
    first = await codec.encode_chat(talk)
    assert len(waited) == 1, "all of it is new"
    assert (await codec.encode_chat(talk)).tolist() == first.tolist()
    longer = [*talk, {"role": "assistant", "content": "b" * 500}]
    found = await codec.encode_chat(longer)
    assert len(waited) == 1, "little of it is new"
    assert codec.chat_template is not None
    assert found.tolist() == codec.encode_now(codec.chat_template.render(longer), False).tolist()
    await codec.encode_chat([{"role": "user", "content": "c" * 20_000}])
    assert len(waited) == 2, "a long one is rendered beside the loop, too"
    with pytest.raises(PromptTooLong):
        await codec.encode_chat(talk, tokens_max=100)
    codec.close()


def test_a_tokenizer_whose_parts_depend_on_each_other_is_given_whole_prompts(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, pre_tokenizers

    make_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first")  # the first part only gets a mark
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([metaspace, tokenizer.pre_tokenizer])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(tmp_path, threads=1)
    text = f"a{END}b{END}"
    assert codec.encode_now(text, False).tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    assert codec.counters.parts_encoded <= 1, "nothing was cut"
    codec.close()


LINES = st.lists(
    st.one_of(TEXT, st.sampled_from(["word\n", "x\n\n", "\n", " y\n z", "1\n", ".\n", *SPECIAL])), max_size=40
)


def trained(pre_tokenizer: Any, normalizer: Any, model: Any, trainer: Any) -> Any:
    """A tokenizer of another family than the test's own, made of this file."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer(model)
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(Path(__file__).read_text().splitlines(keepends=True), trainer)
    return tokenizer


@pytest.fixture(scope="module")
def lines_codec(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A codec whose tokenizer never merges a letter with the end of a line."""
    from tokenizers import AddedToken, models, pre_tokenizers, trainers

    directory = make_tokenizer(tmp_path_factory.mktemp("lines"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet)
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), None, models.BPE(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    codec = TextCodec(directory, threads=1)
    yield codec
    codec.close()


@given(pieces=LINES)
def test_texts_cut_at_the_ends_of_lines_are_the_whole(lines_codec: TextCodec, pieces: list[str]) -> None:
    text = "long enough to be cut\n" * 30 + "".join(pieces * 8)
    whole = lines_codec._tokenizer.encode(text, add_special_tokens=False).ids
    assert len(lines_codec._parts(text)) > 1
    assert lines_codec.encode_now(text, False).tolist() == whole


@asynchronous
async def test_of_a_document_that_is_asked_about_again_only_the_end_is_tokenised(
    lines_codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = lines_codec
    document = "".join(f"line {n} of a document\n" for n in range(300))
    before = codec.counters.parts_encoded
    codec.encode_now(f"{document}Question 1?", False)
    assert codec.counters.parts_encoded - before == len(codec._parts(document)) > 5
    monkeypatch.setattr(codec._queue, "run", None)  # nothing waits for a thread

    async def asked(number: int) -> tuple[int, int]:
        before = codec.counters.parts_encoded, codec.counters.parts_found
        text = f"{document}Question {number}?"
        ids = await codec.encode(text, special_tokens=False)
        assert ids.tolist() == codec._tokenizer.encode(text, add_special_tokens=False).ids
        return codec.counters.parts_encoded - before[0], codec.counters.parts_found - before[1]

    parts = codec._parts(document + "Question 1?")
    pieces = len(_chunks(parts[-1], FINE_CHARACTERS))
    assert pieces > 2
    assert await asked(2) == (pieces, len(parts) - 1), "the part that has not been seen is cut again"
    assert await asked(3) == (1, len(parts) - 1 + pieces - 1), "and of its pieces only the question is new"


@asynchronous
async def test_of_a_prompt_only_what_is_in_no_fine_piece_counts_as_new(
    lines_codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the whole parts around it counted, so that a short question went to a thread."""
    codec = lines_codec
    lines = "".join(f"line {n:03} of what they share\n" for n in range(113))

    def prompt(number: int) -> str:
        return f"{lines[:1500]}user {number}\n{lines[1500:]}Question {number}?"

    codec.encode_now(prompt(10), False)
    changed = [part for part in codec._parts(prompt(11)) if codec.cache.get(part) is None]
    assert len(changed) == 2 and sum(map(len, changed)) > LOOP_NEW_CHARACTERS
    codec.encode_now(prompt(11), False)  # its pieces are known from here on
    monkeypatch.setattr(codec._queue, "run", None)  # nothing waits for a thread
    framed = codec._tokenizer.encode(prompt(12), add_special_tokens=True).ids
    assert (await codec.encode(prompt(12))).tolist() == framed
    bare = codec._tokenizer.encode(prompt(13), add_special_tokens=False).ids
    assert (await codec.encode_made(3000, lambda: [prompt(13), [7]])).tolist() == [*bare, 7]


@given(text=st.text(st.sampled_from("aZ1é .\r\n"), max_size=40), start=st.integers(0, 45))
def test_a_line_that_ends_with_a_letter_is_found_as_by_an_expression(text: str, start: int) -> None:
    match = re.compile(r"[A-Za-z](?=\n)").search(text, start)
    assert _line_end(text, start) == (0 if match is None else match.end())


@pytest.mark.parametrize("family", ["byte level", "llama 3", "whole texts", "marks of spaces", "word pieces", "rstrip"])
def test_a_tokenizer_is_cut_at_the_ends_of_lines_only_where_that_changes_nothing(family: str) -> None:
    from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe, wordpiece = (
        trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet),
        trainers.WordPieceTrainer(special_tokens=["[UNK]"]),
    )
    llama = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(llama), "isolated"), bytes_only])
    spaces = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    words = models.WordPiece(unk_token="[UNK]")
    kinds: dict[str, tuple[Any, ...]] = {
        "byte level": (pre_tokenizers.ByteLevel(add_prefix_space=False), None, models.BPE(), bpe),
        "llama 3": (split, None, models.BPE(), bpe),
        "whole texts": (bytes_only, None, models.BPE(), bpe),
        "marks of spaces": (None, spaces, models.BPE(byte_fallback=True), trainers.BpeTrainer(vocab_size=900)),
        "word pieces": (pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer(), words, wordpiece),
        "rstrip": (split, None, models.BPE(), bpe),
    }
    tokenizer = trained(*kinds[family])
    if family == "rstrip":
        tokenizer.add_special_tokens([AddedToken("turn", rstrip=True)])
    text = Path(__file__).read_text()
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    parts = [tokenizer.encode(chunk, add_special_tokens=False).ids for chunk in tokenizing._chunks(text)]
    is_cut = tokenizing._lines_are_independent(tokenizer)
    assert is_cut == (family in ("byte level", "llama 3", "word pieces"))
    assert not is_cut or [token for ids in parts for token in ids] == whole


@given(texts=st.lists(st.text("abcdefgh", min_size=1, max_size=40), max_size=60))
def test_the_cache_keeps_to_its_bytes_and_forgets_the_oldest(texts: list[str]) -> None:
    cache = PartCache(2000)
    recent: dict[str, None] = {}
    for text in texts:
        cache.put(text, array("i", list(text.encode())))
        cache.check()
        assert cache.get(text) is not None, "what fits and is newest is there"
        recent.pop(text, None)
        recent[text] = None
    evicted = cache.evicted
    cache.put("x" * 4000, array("i", [1]))
    assert cache.evicted == evicted, "what is too large pushes nothing out"
    kept = [text for text in recent if cache.get(text) is not None]
    assert kept == list(recent)[len(recent) - len(kept) :], "those used longest ago went first"


@asynchronous
async def test_texts_that_wait_are_bounded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = TextCodec(model, threads=1, queue_max=2)
    gate = threading.Event()
    encode = TextCodec._encode_framed

    def slow(self: TextCodec, *given: Any) -> Any:
        gate.wait(30)
        return encode(self, *given)

    monkeypatch.setattr(TextCodec, "_encode_framed", slow)
    waiting = [asyncio.ensure_future(codec.encode(f"{i}" * 2000)) for i in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="2 texts wait"):
        await codec.encode("one more" * 1000)
    gate.set()
    assert [len(ids) for ids in await asyncio.gather(*waiting)] == [2001, 2001, 2001]
    assert len(await codec.encode("there is room again")) == 20
    codec.close()


# --- templates --------------------------------------------------------------------------------------------------------


def test_a_template_has_what_model_makers_count_on(tmp_path: Path) -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}|{{ {'a': '<é>'} | tojson }}\n"
        "{% endfor %}{{ strftime_now('%Y') | length }}{{ tools is none }}{{ add_generation_prompt }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    messages = [{"role": "system", "content": "no"}, {"role": "user", "content": "<b>"}]
    assert template.render(messages) == '<s><b>|{"a": "<é>"}\n4TrueTrue'


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses them: roles must alternate"),
        ("{{ messages[0].content.missing.deeper }}", "UndefinedError"),
        ("{{ messages[9].content + 1 }}", "cannot render"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_template_that_fails_is_the_messages_fault_and_quotes_nothing(source: str, complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "a secret"}])
    assert "secret" not in str(caught.value)


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, {}) is None
    several = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    assert load_chat_template(tmp_path, several).render([]) == "d"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    config = {"chat_template": "config", "eos_token": {"content": "</s>"}}
    assert load_chat_template(tmp_path, config).render([]) == "file </s>"
    with pytest.raises(InvalidConfig, match="does not compile"):
        ChatTemplate("{% for %}", {})
    with pytest.raises(InvalidConfig, match="must be text"):
        load_chat_template(tmp_path / "other", {"chat_template": 7})


def test_the_tiny_models_template_renders_as_transformers_renders_it() -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install 'preble[torch]'")
    from transformers.utils.chat_template_utils import render_jinja_template

    from preble.engines.torch.tiny_models import CHAT_TEMPLATE

    messages = [{"role": "user", "content": "Hi\n"}, {"role": "assistant", "content": "  Yes <b>"}]
    theirs, _ = render_jinja_template(
        [messages], chat_template=CHAT_TEMPLATE, add_generation_prompt=True, bos_token="B"
    )
    assert ChatTemplate(CHAT_TEMPLATE, {"bos_token": "B"}).render(messages) == theirs[0]


# --- the model's directory --------------------------------------------------------------------------------------------


def test_a_directory_that_will_not_do_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"there is no file .*tokenizer\.json"):
        TextCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidConfig, match="cannot be read"):
        TextCodec(tmp_path)
    make_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(InvalidConfig, match="is not JSON"):
        TextCodec(tmp_path)


def test_the_first_difference_of_two_tokenizers_is_found(model: Path, tmp_path: Path) -> None:
    assert first_difference(model, model) == ""
    other = swap_letters(make_tokenizer(tmp_path), "w", "x")
    # "Hello, world!" after the token that begins every prompt: its w is the ninth.
    place = 1 + tokenizing.PROBES[0].index("w")
    said = first_difference(model, other)
    assert said == f"probe 0, position {place}: the gateway has token 119, the worker 120"
