"""Plain data that crosses module borders: workers, requests, cache events, decisions' parts. No behaviour beyond
validation.

Everything here is frozen and may be shared between threads. `Decision` and `Match` live in `_placement/decision` (they
are built in compiled code) and are re-exported by the package.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import inf
from operator import attrgetter

from .errors import InvalidConfig, InvalidInput
from .lazy_typing import TYPE_CHECKING, Any, dataclass, field, replace

if TYPE_CHECKING:
    from typing import Literal, NamedTuple

    # Why E2 chose a worker (docs/e2.md); another policy has a word of its own, mostly its name.
    Reason = Literal["exploit", "explore", "escape", "rebalance", "replica", "rendezvous"] | str
    FinishReason = Literal["stop", "length", "abort"]
    GrammarKind = Literal["json_schema", "regex", "ebnf", "choice", "structural_tag"]
    Priority = Literal["interactive", "batch"]
    Role = Literal["both", "prefill", "decode"]
else:
    Reason = FinishReason = GrammarKind = Priority = Role = str

BlockHash = int | bytes
NAME_CHARS_MAX = 128  # of a session's name
BOTH: Role = "both"
PREFILL: Role = "prefill"
DECODE: Role = "decode"
ROLES = (BOTH, PREFILL, DECODE)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One inference engine as the scheduler sees it. Frozen.

    `id` is its name, not empty; `kv_capacity_tokens` is the number of tokens whose KV the engine can hold; `block_size`
    its cache granularity in tokens (vLLM: block size, SGLang: page size); `cost_model` a `CostModel`, a preset name or
    a file (*.json), None for the scheduler's own; `max_running` the requests it runs at once, so that
    one more waits for a place, None when unknown;
    `labels` free text for filters and metrics. `cached_first`: of the requests that wait, the engine takes those first
    that have most of their prompt cached (Preble's workers, SGLang's `lpm`), not in order of arrival (vLLM, SGLang's
    `fcfs`). `below_capacity_tokens`: how many fit into the host memory and onto the disk that it moves to what leaves
    the GPU; 0 where that is not known, or its engine reports it. `role`: "both", or what it does of a request,
    "prefill" or "decode" (`GlobalScheduler.schedule_pair`). Raises `InvalidConfig` naming the field.
    """

    id: str
    kv_capacity_tokens: int = 200_000
    block_size: int = 1
    cost_model: Any = None
    max_running: int | None = None
    labels: Mapping[str, str] | None = None
    cached_first: bool = False
    below_capacity_tokens: int = 0
    role: Role = BOTH

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise InvalidConfig(f"WorkerSpec.id must be a non-empty str, got {self.id!r}")
        try:
            self.id.encode()
        except UnicodeEncodeError:
            raise InvalidConfig(f"WorkerSpec.id must be text that UTF-8 can encode, got {self.id!r}") from None
        check_int("WorkerSpec.kv_capacity_tokens", self.kv_capacity_tokens, 1, 2**31 - 1)
        check_int("WorkerSpec.block_size", self.block_size, 1, 65_536)
        check_int("WorkerSpec.below_capacity_tokens", self.below_capacity_tokens, 0, 2**31 - 1)
        if self.max_running is not None:
            check_int("WorkerSpec.max_running", self.max_running, 1, 2**31 - 1)
        if not isinstance(self.cached_first, bool):
            raise InvalidConfig(f"WorkerSpec.cached_first must be True or False, got {self.cached_first!r}")
        check_role("WorkerSpec.role", self.role)


@dataclass(frozen=True, slots=True)
class ServedWork:
    """What an engine says of the requests that it has served: means of `requests` prefills, each `prefill_seconds` long
    from its first iteration to its first token, with `missed_tokens` computed and `prompt_tokens` in all, and
    `token_seconds` between two output tokens, None where it does not say. Raises `InvalidConfig` naming the field."""

    requests: int
    prefill_seconds: float
    missed_tokens: float
    prompt_tokens: float
    token_seconds: float | None = None

    def __post_init__(self) -> None:
        check_int("ServedWork.requests", self.requests, 1, 2**63 - 1)
        for name in ("prefill_seconds", "missed_tokens", "prompt_tokens", "token_seconds"):
            value = getattr(self, name)
            if not (value is None and name == "token_seconds") and not 0.0 < value < inf:
                raise InvalidConfig(f"ServedWork.{name} must be positive and finite, got {value!r}")


# --- sampling ---------------------------------------------------------------------------------------------------------

LOGPROBS_MAX = 20  # alternatives of one output token
LOGIT_BIAS_MAX = 1024  # tokens
ALLOWED_TOKENS_MAX = 1 << 18
BAD_WORDS_MAX, BAD_WORD_CHARS_MAX = 128, 256
GRAMMAR_BYTES_MAX = 256 << 10
GRAMMAR_KINDS = ("json_schema", "regex", "ebnf", "choice", "structural_tag")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must conform to (structured output). `kind` is one of `GRAMMAR_KINDS`, `text` says it in that
    language: a JSON schema, a regular expression, a grammar in EBNF, a JSON list of texts to choose from, or an
    engine's structural tag (JSON). The engine reads it. Raises `InvalidInput` naming the field.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise InvalidInput(f"Grammar.kind must be one of {', '.join(GRAMMAR_KINDS)}, got {self.kind!r}")
        if not isinstance(self.text, str) or not 0 < len(self.text.encode("utf-8", "replace")) <= GRAMMAR_BYTES_MAX:
            raise InvalidInput(f"Grammar.text must be a text of 1 to {GRAMMAR_BYTES_MAX} bytes")
        if self.kind in ("json_schema", "choice", "structural_tag"):
            _check_json(self.kind, self.text)


def _check_json(kind: str, text: str) -> None:
    import json  # few need it, and `import preble` pays for all of them

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"Grammar.text: a {kind} must be JSON: {type(error).__name__}") from None
    if kind == "choice" and not (isinstance(value, list) and value and all(isinstance(x, str) and x for x in value)):
        raise InvalidInput("Grammar.text: a choice must be a JSON list of texts, none of them empty")


# Fields that not every engine has -> the range of their numbers, and the values that ask for nothing.
_RANGES: Mapping[str, tuple[float, float, tuple[float, ...]]] = {
    "top_k": (-1, 2**31 - 1, (-1, 0)),
    "min_p": (0, 1, (0,)),
    "min_new_tokens": (0, 2**31 - 1, (0,)),
    "frequency_penalty": (-2, 2, (0,)),
    "presence_penalty": (-2, 2, (0,)),
    "repetition_penalty": (0.01, 2, (1,)),
    "logprobs": (0, LOGPROBS_MAX, ()),
}
_ranged_of = attrgetter(*_RANGES)
_NONE_RANGED = (None,) * len(_RANGES)
_all_of = attrgetter(*_RANGES, "logit_bias", "grammar", "allowed_token_ids", "bad_words")
_NONE_OF_ALL = (None,) * (len(_RANGES) + 4)
_WHOLE_NUMBERS = frozenset({"top_k", "min_new_tokens", "logprobs"})
# All names that `SamplingParams.needs` may give, and so that an engine may say it has.
SAMPLING_FIELDS = (*_RANGES, "logit_bias", "allowed_token_ids", "bad_words", *GRAMMAR_KINDS)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose output tokens. What is None is not said: the engine does what the model's maker says
    (generation_config.json), else as if there were no such field.

    `max_new_tokens`: bound of the output, 128 where nothing is said. `stop_token_ids` end it, beside the model's own
    ends, which `ignore_eos` leaves out. `temperature` 0 is greedy, and what is done unless another one, or None, is
    given. `top_p` in (0, 1]. `top_k`: only the likeliest so many; -1 and 0 mean all. `min_p`: only what is at least so
    likely, relative to the likeliest. `min_new_tokens`: none of the tokens that end the output before so many others.
    `frequency_penalty` and `presence_penalty` count the output's tokens, `repetition_penalty` what the engine counts.
    `logit_bias`: added to the logits of tokens, by id. `logprobs`: the output tokens' log probabilities are wanted, and
    of each so many alternatives. `grammar`: what the output must conform to. `allowed_token_ids`: no others are chosen.
    `bad_words`: texts that do not come, as the engine tokenises them.

    With a `seed` sampling is repeatable: the draw for output position k depends only on (seed, k) where the engine can
    do that (torch), so a request resumed on another worker continues alike. Without one every request draws anew.
    Raises `InvalidInput` naming the field.
    """

    max_new_tokens: int = 128
    temperature: float | None = 0.0
    top_p: float | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_new_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_int("SamplingParams.max_new_tokens", self.max_new_tokens, 1, 2**31 - 1, InvalidInput)
        if self.seed is not None:
            check_int("SamplingParams.seed", self.seed, 0, 2**63 - 1, InvalidInput)
        if self.temperature is not None and not 0.0 <= self.temperature < 1e3:
            raise InvalidInput(f"SamplingParams.temperature must be in [0, 1000), got {self.temperature!r}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InvalidInput(f"SamplingParams.top_p must be in (0, 1], got {self.top_p!r}")
        if _ranged_of(self) != _NONE_RANGED:
            self._check_ranges()
        if self.logit_bias is not None:
            _check_bias(self.logit_bias)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidInput(f"SamplingParams.grammar must be a Grammar, got {type(self.grammar).__name__}")
        if self.allowed_token_ids is not None:
            _check_allowed(self.allowed_token_ids)
        if self.bad_words is not None:
            _check_bad_words(self.bad_words)

    def _check_ranges(self) -> None:
        for name, (low, high, _) in _RANGES.items():
            value = getattr(self, name)
            if value is None:
                continue
            if name in _WHOLE_NUMBERS:
                check_int(f"SamplingParams.{name}", value, int(low), int(high), InvalidInput)
            elif not low <= value <= high:
                raise InvalidInput(f"SamplingParams.{name} must be in [{low}, {high}], got {value!r}")
        if self.min_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidInput(f"SamplingParams.min_new_tokens must be at most max_new_tokens, {self.max_new_tokens}")

    def needs(self) -> tuple[str, ...]:
        """Returns the fields that ask for more than any engine has, by name: some of `SAMPLING_FIELDS`. An engine that
        lacks one must not run the request (`EngineInfo.sampling_fields`). Raises nothing. O(fields)."""
        if _all_of(self) == _NONE_OF_ALL:
            return ()
        asked = [
            name
            for name, (_, _, nothing) in _RANGES.items()
            if (value := getattr(self, name)) is not None and value not in nothing
        ]
        asked += [name for name in ("logit_bias", "allowed_token_ids", "bad_words") if getattr(self, name)]
        if self.grammar is not None:
            asked.append(self.grammar.kind)
        return tuple(asked)

    def left(self, max_new_tokens: int, output_tokens: int = 0) -> SamplingParams:
        """Returns what still counts after `output_tokens`, for one that may have `max_new_tokens` more. Raises
        InvalidInput. O(fields)."""
        least = None if self.min_new_tokens is None else max(self.min_new_tokens - output_tokens, 0)
        least = None if least is None else min(least, max_new_tokens)
        return replace(self, max_new_tokens=max_new_tokens, min_new_tokens=least)


def _check_allowed(ids: tuple[int, ...]) -> None:
    whole = isinstance(ids, tuple) and 0 < len(ids) <= ALLOWED_TOKENS_MAX and all(type(one) is int for one in ids)
    if not whole or min(ids) < 0 or max(ids) >= 2**31:
        text = f"a tuple of 1 to {ALLOWED_TOKENS_MAX} token ids"
        raise InvalidInput(f"SamplingParams.allowed_token_ids must be {text}")


def _check_bad_words(words: tuple[str, ...]) -> None:
    few = isinstance(words, tuple) and 0 < len(words) <= BAD_WORDS_MAX
    if not few or not all(isinstance(one, str) and 0 < len(one) <= BAD_WORD_CHARS_MAX for one in words):
        text = f"a tuple of 1 to {BAD_WORDS_MAX} texts, each of 1 to {BAD_WORD_CHARS_MAX} characters"
        raise InvalidInput(f"SamplingParams.bad_words must be {text}")


def _check_bias(bias: Mapping[int, float]) -> None:
    if not isinstance(bias, Mapping) or len(bias) > LOGIT_BIAS_MAX:
        raise InvalidInput(f"SamplingParams.logit_bias must be a mapping of at most {LOGIT_BIAS_MAX} tokens")
    for token, value in bias.items():
        check_int("SamplingParams.logit_bias: a token id", token, 0, 2**31 - 1, InvalidInput)
        if isinstance(value, bool) or not isinstance(value, float | int) or not -100.0 <= value <= 100.0:
            raise InvalidInput(f"SamplingParams.logit_bias[{token}] must be a number in [-100, 100]")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithm of an output token's probability, and the likeliest tokens with theirs, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# --- cache events (engine -> scheduler) -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks entered a worker's cache: `token_ids`, shape [blocks * block_size], are those of `block_hashes` in order,
    `block_size` tokens each.

    `parent_block_hash` None means the first block starts the prompt. Hashes are opaque keys, int or bytes. `namespace`:
    that of their requests. `medium`: which memory of the engine they are in, by its own name; a block is cached as long
    as one has it.
    """

    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Sequence[int]
    block_size: int
    namespace: Hashable = None
    medium: str | None = None


if TYPE_CHECKING:

    class _Keys(NamedTuple):
        lora_name: str | None
        lora_id: int | str | None
        cache_salt: str | None
        extra_keys: tuple[Hashable, ...]

else:
    _Keys = namedtuple("_Keys", ("lora_name", "lora_id", "cache_salt", "extra_keys"))


class BlockKeys(_Keys):
    """What an engine distinguishes a block by beside its tokens: LoRA, salt, and vLLM's extra keys (salts, images,
    prompt embeddings; the LoRA's name left out)."""

    __slots__ = ()

    def namespace(self, base: Hashable = None) -> tuple[Hashable, ...]:
        """The namespace of such blocks unless the caller names another: ("lora", name), ("salt", salt), ("extra",
        keys), joined in this order where there are several, after `base` if it is not None."""
        lora = self.lora_name if self.lora_name is not None else self.lora_id
        parts: tuple[Hashable, ...] = () if base is None else (base,)
        for kind, value in (("lora", lora), ("salt", self.cache_salt), ("extra", self.extra_keys or None)):
            parts += () if value is None else (kind, value)
        return parts


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks left a worker's cache: `block_hashes`, from `medium` (as in BlockStored). A removed block takes every
    longer prefix through it along."""

    block_hashes: Sequence[BlockHash]
    medium: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """A worker's cache was emptied."""


@dataclass(frozen=True, slots=True)
class PrefixEvicted:
    """A worker has dropped `token_ids` of `namespace` from position `kept_tokens` on, and with it every cached prefix
    through there.

    This is what `LocalScheduler` reports: no hashes, the tokens themselves. `moved_to`: the medium that holds them now
    (as in BlockStored); None: none does.
    """

    token_ids: Sequence[int]
    kept_tokens: int
    namespace: Hashable = None
    moved_to: str | None = None


@dataclass(frozen=True, slots=True)
class PrefixStored:
    """A worker now caches `token_ids` from the prompt's start on."""

    token_ids: Sequence[int]
    namespace: Hashable = None


# Where several routers use one worker, it reports to all of them what each one's requests do there. Who gets a report
# books it like its own (`preble/scheduling/peer_bookings.py`), so every router's bookings are of the whole fleet.


@dataclass(frozen=True, slots=True)
class RequestPlaced:
    """A request of `router` has come to a worker. `request_id` is that router's; the two name it on this worker.
    `half`: which half of a request that two workers serve, "prefill" or "decode"; None for a whole one."""

    router: str
    request_id: str
    token_ids: Sequence[int]
    namespace: Hashable = None
    max_new_tokens: int | None = None
    half: Role | None = None


@dataclass(frozen=True, slots=True)
class RequestPrefilled:
    """A placed request has its first token; `cached_tokens` of its prompt were cached, if the engine says."""

    router: str
    request_id: str
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A placed request is over; `output_tokens` None: without a result (cancelled, refused, its router gone)."""

    router: str
    request_id: str
    output_tokens: int | None = None


CacheEvent = (
    BlockStored
    | BlockRemoved
    | AllBlocksCleared
    | PrefixEvicted
    | PrefixStored
    | RequestPlaced
    | RequestPrefilled
    | RequestEnded
)


# --- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """One worker's terms in one decision, in seconds (docs/e2.md).

    `worker`: its id. `matched_tokens` of the prompt are estimated cached there, `missed_tokens` are not. `candidate`:
    whether it might have been chosen. `total_seconds` is what E2 compares, and the sum of eight terms: `queue_seconds`
    of waiting, `prefill_seconds` of its own missed tokens, `others_seconds` that others wait for it, `decode_seconds`
    of its own output in that batch, `eviction_seconds` to compute again what goes for it, and for room where it would
    be a copy, `balance_seconds` for the load so far, and `credit_seconds`, 0 or less: a copy of the prefix for which
    earlier requests have saved up; and `loading_seconds`, to bring the `host_tokens` and `disk_tokens` among the
    matched ones into the GPU's memory. `load_seconds` is that load, L of the paper's Algorithm 2. `score` is what the
    policy compared (equal to `total_seconds` for E2).
    """

    worker: str
    matched_tokens: int
    missed_tokens: int
    load_seconds: float
    prefill_seconds: float
    queue_seconds: float
    others_seconds: float
    decode_seconds: float
    eviction_seconds: float
    balance_seconds: float
    credit_seconds: float
    total_seconds: float
    score: float
    candidate: bool
    loading_seconds: float = 0.0
    host_tokens: int = 0
    disk_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PullCost:
    """What it would cost and save, in seconds, if the chosen worker took over KV of the prompt's first `tokens` tokens
    from `source`, which is estimated to cache them: `moved_tokens` of them, `moved_bytes` in all.

    `pull_seconds`: until the transfer is over, of which it begins after `link_seconds`, when earlier ones are; the
    request waits `wait_seconds` of it for nothing else. `source_seconds` and `target_seconds`: what others wait at
    either end, for its engine and its link. `recompute_seconds`: the prefill of these tokens, for which others wait
    `others_seconds`. `saved_seconds`: what all of them save.
    """

    source: str
    tokens: int
    moved_tokens: int
    moved_bytes: int
    pull_seconds: float
    wait_seconds: float
    source_seconds: float
    target_seconds: float
    recompute_seconds: float
    others_seconds: float
    saved_seconds: float
    link_seconds: float = 0.0

    @property
    def pays(self) -> bool:
        """Whether it is pulled: something is saved, and the request itself waits less than for computing."""
        return self.saved_seconds > 0.0 and self.wait_seconds < self.recompute_seconds

    @property
    def worth_seconds(self) -> float:
        """How long the request waits for it at most: as long as computing takes, and it waits in any case."""
        return self.recompute_seconds + self.pull_seconds - self.wait_seconds


@dataclass(frozen=True, slots=True)
class PairDecision:
    """Where a request goes: made by `schedule_pair`, for the request with `request_id`.

    `worker` decodes it, and prefills it as well where `prefill_worker` is None. Else that one prefills its prompt of
    `prompt_tokens`, under `prefill_request_id`, and hands the KV over: `moved_tokens`, as many as are not estimated
    cached on `worker`, in `transfer_seconds`. `matched_tokens`: those that are cached where it is prefilled. `reason`:
    "pair", or that of the decision for one worker. `price_seconds`, and of the cheapest other way `other_seconds`;
    infinity where there is none.
    """

    request_id: Hashable
    worker: str
    prompt_tokens: int
    matched_tokens: int
    reason: Reason
    prefill_worker: str | None = None
    prefill_request_id: Hashable = None
    moved_tokens: int = 0
    transfer_seconds: float = 0.0
    price_seconds: float = inf
    other_seconds: float = inf


@dataclass(frozen=True, slots=True)
class PairCost:
    """What a request costs in seconds on the cheapest pair of workers, `price_seconds`, of which `prefill_worker`
    prefills its prompt and `decode_worker` decodes its output: `moved_tokens`, which the latter is not estimated to
    cache, are handed over in `transfer_seconds`. `one_seconds`: on the cheapest worker that does both; infinity where
    there is none."""

    prefill_worker: str
    decode_worker: str
    moved_tokens: int
    transfer_seconds: float
    price_seconds: float
    one_seconds: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why `worker` would be chosen now, for `reason`, by `policy`. `margin` is the score of `runner_up`, the next best
    (None with one candidate), minus the winner's (0 with one candidate); negative where the winner was drawn among
    several, or the prompt redirected to it. Of the prompt's `prompt_tokens`, `matched_tokens` are estimated cached
    there. `workers`: the terms of each. `pull`: the cheapest way to take over KV that another worker caches; None where
    nobody can, or nobody has more. `pair`: of `explain_pair`, the cheapest pair; None where there are no two."""

    worker: str
    runner_up: str | None
    margin: float
    reason: Reason
    policy: str
    prompt_tokens: int
    matched_tokens: int
    workers: Sequence[WorkerCost] = field(default_factory=tuple)
    pull: PullCost | None = None
    pair: PairCost | None = None


INTERACTIVE: Priority = "interactive"
BATCH: Priority = "batch"  # fills what the rest leaves
PRIORITIES = (INTERACTIVE, BATCH)


@dataclass(frozen=True, slots=True)
class Claim:
    """On whose account a request is served, and how soon. Raises `InvalidInput` naming the field.

    `tenant`: at most NAME_CHARS_MAX characters; who names none shares "" with the others. `weight`: of its share.
    `deadline_seconds`: after its arrival, within which its first token is of use. `priority`: "interactive" or "batch".
    """

    tenant: str = ""
    weight: float = 1.0
    deadline_seconds: float | None = None
    priority: Priority = INTERACTIVE

    def __post_init__(self) -> None:
        if not isinstance(self.tenant, str) or len(self.tenant) > NAME_CHARS_MAX:
            raise InvalidInput(f"tenant must be a text of at most {NAME_CHARS_MAX} characters, got {self.tenant!r}")
        for name in ("weight", "deadline_seconds"):
            value = getattr(self, name)
            if value is None and name == "deadline_seconds":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < inf:
                raise InvalidInput(f"{name} must be positive and finite, got {value!r}")
        if self.priority not in PRIORITIES:
            raise InvalidInput(f"priority must be one of {', '.join(PRIORITIES)}, got {self.priority!r}")


def claim_of(
    tenant: str | None, deadline_seconds: float | None, priority: Priority | None, weight: float = 1.0
) -> Claim:
    """What a caller says of these; None where it says nothing. Raises `InvalidInput` naming the argument."""
    name, kind = ("" if tenant is None else tenant), (INTERACTIVE if priority is None else priority)
    return Claim(name, weight, deadline_seconds, kind)


@dataclass(frozen=True, slots=True)
class SessionHint:
    """What a client says its request belongs to; "" where it says nothing. Names are the client's own: two clients may
    use the same one, and nothing may be trusted to them alone.

    `session` is a conversation or an agent's run, `agent` the one within it whose request this is, `parent` the session
    or agent that started it. Each is at most NAME_CHARS_MAX visible ASCII characters. `shared`: several conversations
    may have this session's name (a cache key, a user), so nobody is placed by it. A hint is true if it names something.
    Raises `InvalidInput` naming the field.
    """

    session: str = ""
    parent: str = ""
    agent: str = ""
    shared: bool = False

    def __post_init__(self) -> None:
        for name in ("session", "parent", "agent"):
            value = getattr(self, name)
            if not isinstance(value, str) or not is_session_name(value or "-"):
                raise InvalidInput(f"SessionHint.{name} must be visible ASCII, at most {NAME_CHARS_MAX} characters")
        if not isinstance(self.shared, bool):
            raise InvalidInput(f"SessionHint.shared must be a bool, got {self.shared!r}")

    def __bool__(self) -> bool:
        return bool(self.session or self.parent or self.agent)


def is_session_name(text: str) -> bool:
    """Whether it may name a session: 1 to NAME_CHARS_MAX visible ASCII characters."""
    return 0 < len(text) <= NAME_CHARS_MAX and text.isascii() and text.isprintable() and " " not in text


def check_int(name: str, value: Any, low: int, high: int, error: type[InvalidInput] = InvalidConfig) -> int:
    """Return `value` if it is an int in [low, high]; raise `error` naming `name` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise error(f"{name} must be an int in [{low}, {high}], got {value!r}")
    return value


def check_role(name: str, value: Any) -> Role:
    """Return `value` if it is one of `ROLES`; raise `InvalidConfig` naming `name` otherwise."""
    if not isinstance(value, str) or value not in ROLES:
        raise InvalidConfig(f"{name} must be one of {', '.join(ROLES)}, got {value!r}")
    return value


def check_seconds(name: str, value: Any, error: type[InvalidInput] = InvalidConfig) -> None:
    """Raise `error` naming `name` unless `value` is a finite number, of Python or numpy, of at least 0."""
    is_number = hasattr(value, "__float__") and not isinstance(value, bool)
    if not is_number or not 0.0 <= value < inf:
        raise error(f"{name} must be finite and at least 0, got {value!r}")


# What a number of a configuration must be, in the words of the error.
_BOUNDS: Mapping[str, Callable[[Any], bool]] = {
    "be positive": lambda value: value > 0,
    "not be negative": lambda value: value >= 0,
    "be finite and not negative": lambda value: 0 <= value < inf,
    "be in (0, 1]": lambda value: 0 < value <= 1,
}


def check_fields(config: Any, must: str, *names: str) -> None:
    """Raise `InvalidConfig` for the first of these fields that is not what it must be, one of `_BOUNDS`."""
    for name in names:
        if not _BOUNDS[must](getattr(config, name)):
            raise InvalidConfig(f"{type(config).__name__}.{name} must {must}, got {getattr(config, name)!r}")
