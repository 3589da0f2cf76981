"""The demo's prompts: questions about real source text. Owns documents, questions and arrival times; sends nothing.

A document is the head of a standard-library module, cut to 1-3 thousand tokens. A prompt is a document followed by one
question about a function or class that stands in it, so all prompts about one document share its tokens as a prefix.
Everything follows from the seed and from this Python's standard library.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import EngineError
from ...workloads.tokenizers import read_file

Tokenize = Callable[[str], list[int]]

DOCUMENT_TOKENS = (1000, 3000)
QUESTIONS_PER_DOCUMENT_MIN = 6
PREAMBLE = "You answer questions about Python source code.\n\n"
ABOUT_FUNCTIONS = (
    "What does `{name}` return?",
    "Which arguments does `{name}` take, and what are they for?",
    "Which exceptions can `{name}` raise, and when?",
    "Explain `{name}` to someone new to this module.",
)
ABOUT_CLASSES = (
    "What is the class `{name}` for?",
    "Which methods does the class `{name}` define?",
)


@dataclass(frozen=True, slots=True)
class Document:
    """The head of one module: `prefix` is the text every prompt about it starts with, of about `tokens` tokens."""

    module: str
    prefix: str
    tokens: int
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One request: a document's prefix and a question, as tokens; it arrives `arrival_seconds` after the start."""

    number: int
    document: int
    question: str
    token_ids: tuple[int, ...]
    arrival_seconds: float


def load_documents(count: int, tokenize: Tokenize, rng: random.Random) -> list[Document]:
    """`count` documents from modules chosen by `rng`. Raises `EngineError` if the library's source is missing."""
    directory = Path(sysconfig.get_path("stdlib"))
    paths = sorted(directory.glob("*.py"))
    rng.shuffle(paths)
    documents: list[Document] = []
    for path in paths:
        if len(documents) == count:
            break
        document = cut_document(path.stem, path.read_text(encoding="utf-8", errors="replace"), tokenize, rng)
        if document is not None:
            documents.append(document)
    if len(documents) < count:
        raise EngineError(
            f"{directory} yields {len(documents)} documents, {count} are needed: is its source installed?"
        )
    return documents


def cut_document(module: str, source: str, tokenize: Tokenize, rng: random.Random) -> Document | None:
    """The head of a module up to a length drawn by `rng`; None if it is too short or has too little to ask about."""
    low, high = DOCUMENT_TOKENS
    wanted = rng.randint(low, high)
    lines, tokens = [], 0
    for line in source.splitlines(keepends=True):
        tokens += len(tokenize(line))
        if tokens > wanted:
            break
        lines.append(line)
    questions = questions_about(source, len(lines))
    if tokens < low or len(questions) < QUESTIONS_PER_DOCUMENT_MIN:
        return None
    prefix = f"{PREAMBLE}File {module}.py:\n{''.join(lines)}\n"
    return Document(module, prefix, len(tokenize(prefix)), questions)


def questions_about(source: str, last_line: int) -> tuple[str, ...]:
    """Questions about the functions, classes and methods whose definition ends within the first `last_line` lines."""
    questions: list[str] = []
    for name, is_class in definitions(ast.parse(source), last_line):
        forms = ABOUT_CLASSES if is_class else ABOUT_FUNCTIONS
        questions.extend(form.format(name=name) for form in forms)
    return tuple(questions)


def definitions(module: ast.Module, last_line: int) -> list[tuple[str, bool]]:
    """(dotted name, is a class) of top-level definitions and of methods, in order of appearance."""
    found = []
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            inside = [(f"{node.name}.{n.name}", n) for n in methods]
            found += [(name, False) for name, n in inside if ends_by(n, last_line) and not n.name.startswith("_")]
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ends_by(node, last_line):
            found.append((node.name, isinstance(node, ast.ClassDef)))
    return found


def ends_by(node: ast.stmt, last_line: int) -> bool:
    """True if the whole of `node` stands in the first `last_line` lines."""
    return (node.end_lineno or node.lineno) <= last_line


def choose_prompts(
    documents: Sequence[Document], count: int, tokenize: Tokenize, rng: random.Random
) -> list[DemoPrompt]:
    """`count` prompts, each about a document and a question drawn by `rng`, all arriving at 0; see `with_arrivals`."""
    prompts = []
    for number in range(count):
        index = rng.randrange(len(documents))
        question = rng.choice(documents[index].questions)
        token_ids = tokenize(f"{documents[index].prefix}Question: {question}\nAnswer:")
        prompts.append(DemoPrompt(number, index, question, tuple(token_ids), 0.0))
    return prompts


def with_arrivals(prompts: Sequence[DemoPrompt], rate_per_second: float, rng: random.Random) -> list[DemoPrompt]:
    """The same prompts, arriving as a Poisson process of `rate_per_second`."""
    now, timed = 0.0, []
    for prompt in prompts:
        now += rng.expovariate(rate_per_second)
        timed.append(DemoPrompt(prompt.number, prompt.document, prompt.question, prompt.token_ids, now))
    return timed


def word_tokens(text: str) -> list[int]:
    """A tokenizer that needs no model: one id per word, run of blanks or sign; the same on every machine."""
    return [zlib.crc32(part.encode()) % 32_000 for part in re.findall(r"\w+|\s+|[^\w\s]", text)]


def model_tokenizer(model: Path) -> Tokenize:
    """The tokenizer of a model directory in transformers format."""
    tokenizer = read_file(model, "torch")
    return lambda text: list(tokenizer.encode(text).ids)
