"""`generate`: workloads with the published experiments' parameters, without any file. Owns those parameters.

Prompts are random token ids with the lengths and the sharing of the real data sets; nothing in them can be read. How
lengths are spread is in `lengths`, with the published statistics, arrivals in `arrivals`.

    BOS + system text | what the group shares: tools, document, video, problem | what one request has: uuid, question
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..errors import InvalidInput
from ..types import check_int
from .arrivals import check_positive, generator
from .files import constant
from .lengths import TABLE1, Counts, shared_out, spread, spread_below
from .tokenizers import BOS_ID, RESERVED_IDS, WORDS_VOCABULARY
from .types import Int32Array, PromptRequest, Workload, unwritable

REQUESTS_MAX = 10_000_000
UUID_TOKENS = 26  # 36 hexadecimal digits and dashes in Mistral's vocabulary
TOOL_SHARE = 0.8  # of the mixed workload's requests: 7200 to 1800
TOOL_GROUP_SHARE = 4 / 7  # of its groups: 400 tools to 300 videos
EMBODIED_CONTEXT_TOKENS = 4096
CONVERSATION_CONTEXT_TOKENS = 131_072
OWN_TOKENS = 16  # of a chat's first message, before what all chats have


@dataclass(frozen=True, slots=True)
class Recipe:
    """A single-turn workload. Pairs are (mean, std) in tokens.

    `prefix`: the group's own part; longer ones than `prefix_max` are cut to it ("crop") or replaced ("redraw").
    `unique_max` and `output_max` cut what they name. `weight`: a group's share of the requests is "even", in
    proportion to its "prefix" before the cut, or to a number of "questions" drawn for it.
    """

    system: int
    prefix: tuple[float, float]
    unique: tuple[float, float]
    output: tuple[float, float]
    prefix_max: int | None = None
    cut: Literal["crop", "redraw"] = "crop"
    unique_max: int | None = None
    output_max: int | None = None
    weight: Literal["even", "prefix", "questions"] = "even"


QUESTIONS_PER_DOCUMENT = (18.6, 8.6)
# Prompts above 4,096 tokens were dropped from the data set: (1630, 1030) before that leaves the row.
TOOLS = Recipe(145, (1630, 1030), (240, 120), (43, 16), prefix_max=4096 - 145 - 450, cut="redraw", unique_max=450)
# As the experiments ran them: cropped to the context, forced or capped outputs, a uuid before each question.
EXPERIMENT = {
    "toolbench": TOOLS,
    "videoqa": Recipe(17, (9806, 5976), (UUID_TOKENS + 42, 12), (4, 1.5), prefix_max=8192 - 17, weight="prefix"),
    "loogle": Recipe(
        14, (23435, 6105), (UUID_TOKENS + 25, 8), (45, 0), prefix_max=32768 - 45 - 14 - 100, weight="questions"
    ),
    # Outputs by the one table of these runs that was kept: latency over TPOT is 190 tokens at the median, 460 at p90.
    # 12,979 characters, the longest problem that was used, are about 3,245 tokens.
    "programming": Recipe(
        2400, (1200, 1656), (UUID_TOKENS, 0), (241, 188), prefix_max=3245, cut="redraw", output_max=512
    ),
}
# As Table 1 measures the data sets: whole prompts, recorded outputs.
MEASURED = {
    "toolbench": TOOLS,
    "videoqa": Recipe(17, (9806, 5976), (42, 12), (4, 1.5)),
    "loogle": Recipe(14, (23435, 6105), (25, 8), (16, 9.9), weight="questions"),
    "programming": Recipe(2671, (1199, 1656), (1, 0), (190, 343)),
}


def generate(
    name: str,
    *,
    requests: int,
    groups: int,
    seed: int,
    zipf: float | None = None,
    shape: str = "experiment",
) -> Workload:
    """Make a workload of `requests` requests over `groups` prefix groups; all arrive at 0 until arrivals are drawn.

    `name`: "toolbench", "videoqa", "loogle", "programming", "embodied", "mixed" (toolbench and videoqa, 4 to 1) or
    "conversation" (multi-turn chat like Mooncake's trace; groups are conversations). In "embodied" and "conversation"
    a turn is sent after the one before it has finished, and conversations stand randomly interleaved. `shape`:
    "experiment" as the paper's experiments ran it (docs/simulator.md has the parameters), "table1" as its Table 1
    measures the data set. `zipf`: groups' popularity falls as rank ** -zipf, instead of the workload's own; not for
    turns. The same arguments give the same workload on every machine. Raises `InvalidInput` naming the argument.
    """
    if name not in MAKERS:
        raise InvalidInput(f"name must be one of {sorted(MAKERS)}, got {name!r}")
    if shape not in ("experiment", "table1"):
        raise InvalidInput(f'shape must be "experiment" or "table1", got {shape!r}')
    check_int("requests", requests, 1, REQUESTS_MAX, InvalidInput)
    check_int("groups", groups, 1, requests, InvalidInput)
    if zipf is not None:
        check_positive("zipf", zipf)
        if name in TURNS:
            raise InvalidInput(f"zipf is for single requests; {name!r} has turns")
    made = MAKERS[name](name, requests, groups, generator(seed), zipf, shape)
    popularity = "" if zipf is None else f", zipf {zipf:g}"
    return Workload(name, made, f"generated ({shape}, {groups} groups{popularity}, seed {seed})")


def single_turn(
    name: str, requests: int, groups: int, rng: np.random.Generator, zipf: float | None, shape: str
) -> list[PromptRequest]:
    """Requests of one of the recipes, shuffled."""
    recipe = (EXPERIMENT if shape == "experiment" else MEASURED)[name]
    prefixes, counts = groups_of(recipe, requests, groups, rng, zipf)
    system = (constant(BOS_ID, 1), random_ids(rng, recipe.system - 1))
    shared = [constant(WORDS_VOCABULARY + k, n) if name == "videoqa" else random_ids(rng, n)
              for k, n in enumerate(prefixes.tolist())]  # fmt: skip
    unique = pieces(rng, at_most(spread(rng, requests, recipe.unique), recipe.unique_max))
    outputs = at_most(spread(rng, requests, recipe.output), recipe.output_max)
    owners = rng.permutation(np.repeat(np.arange(groups), counts))
    return [
        PromptRequest(f"{name}-{i:06d}", (*system, shared[k], unique[i]), output, f"{name}-{k:05d}")
        for i, (k, output) in enumerate(zip(owners.tolist(), outputs.tolist(), strict=True))
    ]


def groups_of(
    recipe: Recipe, requests: int, groups: int, rng: np.random.Generator, zipf: float | None
) -> tuple[Counts, Counts]:
    """(prefix tokens, requests) of each group."""
    if recipe.cut == "redraw" and recipe.prefix_max is not None:
        whole = prefixes = spread_below(rng, groups, recipe.prefix, recipe.prefix_max)
    else:
        whole = spread(rng, groups, recipe.prefix)
        prefixes = at_most(whole, recipe.prefix_max)
    if zipf is not None:
        shares = np.arange(1, groups + 1, dtype=np.float64) ** -zipf
        return prefixes, rng.multinomial(requests, shares / shares.sum()).astype(np.int64)
    weights = {
        "even": lambda: np.ones(groups),
        "prefix": lambda: whole.astype(np.float64),
        "questions": lambda: spread(rng, groups, QUESTIONS_PER_DOCUMENT).astype(np.float64),
    }[recipe.weight]()
    return prefixes, shared_out(rng, requests, weights)


def at_most(lengths: Counts, limit: int | None) -> Counts:
    """The lengths, none above `limit`."""
    return lengths if limit is None else np.minimum(lengths, limit)


def mixed(
    name: str, requests: int, groups: int, rng: np.random.Generator, zipf: float | None, shape: str
) -> list[PromptRequest]:
    """Tools and videos at the Azure experiment's ratio, shuffled together."""
    if requests < 2 or groups < 2:
        raise InvalidInput(f'groups must be at least 2 for "mixed", got {groups} for {requests} requests')
    tool_requests = min(max(1, round(requests * TOOL_SHARE)), requests - 1)
    tool_groups = min(max(1, round(groups * TOOL_GROUP_SHARE)), groups - 1)
    tools = single_turn("toolbench", tool_requests, tool_groups, rng, zipf, shape)
    videos = single_turn("videoqa", requests - tool_requests, groups - tool_groups, rng, zipf, shape)
    both = [*tools, *videos]
    return [both[place] for place in rng.permutation(len(both)).tolist()]


def embodied(
    name: str, requests: int, groups: int, rng: np.random.Generator, zipf: float | None, shape: str
) -> list[PromptRequest]:
    """Agents in households: a task with demonstrations, to which each turn adds an action and what was seen.

    The next prompt has the recorded action, not the generated one, as the experiments replayed logs. About 47 turns a
    group give Table 1's prompt lengths; more than fit in the context of 4,096 tokens are refused.
    """
    counts = shared_out(rng, requests, np.ones(groups))
    starts = spread(rng, groups, (1740, 340), low=200)
    actions = spread(rng, requests, TABLE1["embodied"].output_tokens)
    seen = spread(rng, requests, (8, 6))
    outputs = actions if shape == "table1" else np.full(requests, 26)
    steps = pieces(rng, actions + seen)
    bos = constant(BOS_ID, 1)
    chains, first = [], 0
    for k, count in enumerate(counts.tolist()):
        mine = slice(first, first + count)
        opening = (bos, random_ids(rng, int(starts[k])))
        turns = turns_of(f"{name}-{k:05d}", opening, outputs[mine].tolist(), [(step,) for step in steps[mine]])
        if turns and turns[-1].prompt_tokens > EMBODIED_CONTEXT_TOKENS:
            raise InvalidInput(f"requests: {count} turns a group do not fit in {EMBODIED_CONTEXT_TOKENS} tokens")
        chains.append(turns)
        first += count
    return interleaved(rng, chains)


def conversation(
    name: str, requests: int, groups: int, rng: np.random.Generator, zipf: float | None, shape: str
) -> list[PromptRequest]:
    """Chats whose prompts grow by the answer and the next message; all share a system prompt of one 512-token block.

    1.45 requests a conversation give the lengths and the hit share of the first half of Mooncake's trace. A chat that
    would outgrow 131,072 tokens loses the end of its first message. Answers are known: the next prompt has them.
    """
    counts = 1 + rng.multinomial(requests - groups, np.full(groups, 1.0 / groups))
    answers = pieces(rng, spread(rng, requests, (346, 251)))
    messages = pieces(rng, spread(rng, requests, (300, 300)))
    openings = spread(rng, groups, (12_200, 19_000), low=2 * OWN_TOKENS)
    system = (constant(BOS_ID, 1), random_ids(rng, 511))
    # Chats differ in their first tokens; what follows is one array for all, which keeps 10**8 tokens small.
    rest = random_ids(rng, CONVERSATION_CONTEXT_TOKENS)
    chains, first = [], 0
    for k, count in enumerate(counts.tolist()):
        mine = slice(first, first + count)
        room = CONVERSATION_CONTEXT_TOKENS - 512 - sum(map(len, answers[mine])) - sum(map(len, messages[mine]))
        if room < 2 * OWN_TOKENS:
            raise InvalidInput(f"requests: {count} turns do not fit in {CONVERSATION_CONTEXT_TOKENS} tokens")
        opening = (random_ids(rng, OWN_TOKENS), rest[: min(int(openings[k]), room) - OWN_TOKENS])
        known = answers[mine]
        steps = zip(known, messages[mine], strict=True)
        chains.append(turns_of(f"{name}-{k:05d}", (*system, *opening), map(len, known), steps, known))
        first += count
    return interleaved(rng, chains)


def turns_of(
    group: str,
    parts: tuple[Int32Array, ...],
    outputs: Iterable[int],
    steps: Iterable[tuple[Int32Array, ...]],
    answers: Sequence[Int32Array] | None = None,
) -> list[PromptRequest]:
    """The turns of one agent or chat whose prompt opens with `parts` and grows by `steps`; `answers` where known."""
    turns: list[PromptRequest] = []
    for turn, (output, step) in enumerate(zip(outputs, steps, strict=True)):
        after = turns[-1].request_id if turns else None
        known = None if answers is None else answers[turn]
        turns.append(PromptRequest(f"{group}.{turn:03d}", parts, output, group, after=after, output_ids=known))
        parts = (*parts, *step)
    return turns


def interleaved(rng: np.random.Generator, chains: list[list[PromptRequest]]) -> list[PromptRequest]:
    """The chains shuffled into one another, each in its own order."""
    owners = rng.permutation(np.repeat(np.arange(len(chains)), [len(chain) for chain in chains]))
    given = [iter(chain) for chain in chains]
    return [next(given[k]) for k in owners.tolist()]


def random_ids(rng: np.random.Generator, tokens: int) -> Int32Array:
    """Random token ids of the vocabulary, shape [tokens], int32, not writable."""
    return unwritable(rng.integers(RESERVED_IDS, WORDS_VOCABULARY, tokens, dtype=np.int32))


def pieces(rng: np.random.Generator, lengths: Counts) -> list[Int32Array]:
    """Random token ids of these lengths: pieces of one array."""
    return np.split(random_ids(rng, int(lengths.sum())), np.cumsum(lengths)[:-1])


Maker = Callable[[str, int, int, np.random.Generator, "float | None", str], list[PromptRequest]]
TURNS = {"embodied", "conversation"}
MAKERS: dict[str, Maker] = {
    **dict.fromkeys(EXPERIMENT, single_turn),
    "mixed": mixed,
    "embodied": embodied,
    "conversation": conversation,
}
