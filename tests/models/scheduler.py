"""A naive model of the global scheduler, to hold the real one against. Owns nothing of the product.

It keeps every request it has seen and every node of the tree as a whole prefix, and recomputes each sum and each term
of a decision from these lists at every question. The rules are those of the docstrings of `_placement/e2.pyx`,
`_cost.pyx` and `_core/tree/layout.pxd`; what it does not say is which dead nodes a tick forgets first
(`NaiveTree.may_go` says which may go).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from zlib import crc32

import preble
from preble import AllBlocksCleared, BlockRemoved, BlockStored, PrefixEvicted, SchedulerConfig, WorkerSpec
from preble.scheduling.peer_bookings import is_peer
from tests.models.cache_accuracy import NaiveAccuracy

Tokens = tuple[int, ...]
Path = tuple[Hashable, Tokens]  # (namespace, every token from the prompt's start)
SLICES = 36
# The rule's constants.
HOLDER_SHARE_MIN, BEHIND_SECONDS, REQUEST_SECONDS, INTERRUPTED_SHARE = 0.9, 0.3, 0.004, 0.1
TOGETHER_SHARE, EVICTED_USES, LOAD_SHARE, PRESSURE_MAX, REPEATED_MAX = 0.3, 2.0, 0.02, 2.0, 10.0
TURN_SHARE, STAY_SHARE = 0.25, 0.125  # of a turn of all places, that a wait counts at most; of what the last stay says
PASSED_SHARE = 0.8  # of what is ahead, that a session's next turn passes where all of it is cached
WORK_SHARE, COPY_SECONDS, MOVED_USES = 0.5, 0.05, 3.0
CREDIT_AGE_SECONDS = 60.0
REUSED_HITS, DRIVEN_OUT_LOOKED = 1.0, 64  # what a copy does not drive out
FLEET_ROUNDS, WAITING_ROUNDS = 3.0, 30.0  # by what it drives out otherwise a copy counts as so many
UNSEEN_DELAYS, DRAW_QUEUE_WEIGHT, HEAD_TOKENS, PLACED_LATELY, OTHERS_MIN = (
    20.0,
    3.0,
    16,
    256,
    0.001,
)  # of several routers
WEIGHT_MIN = 1e-9
SAME_TO = 1e-12  # the model sums in another order: prices nearer to each other than this share are alike


def common(a: Tokens, b: Tokens) -> int:
    """How many leading tokens agree."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def mixed(x: int) -> int:
    """The finalizer of splitmix64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


class NaiveCost:
    """The documented formula, from the coefficients a `CostModel` shows."""

    def __init__(self, model: preble.CostModel) -> None:
        shown = model.coefficients()
        self.knots, self.context, self.pair = shown["knots"], shown["context"], shown["pair"]
        self.start = shown["start"]

    def linear(self, n: float) -> float:
        """Between knots a straight line; the last line goes on; before the first it is flat."""
        if n <= self.knots[0][0] or len(self.knots) == 1:
            return self.knots[0][1]
        lines = list(pairwise(self.knots))
        (x0, y0), (x1, y1) = next((line for line in lines if n <= line[1][0]), lines[-1])
        return y0 + (n - x0) * ((y1 - y0) / (x1 - x0))

    def over_context(self, tokens: float) -> float:
        start, flat, base, slope = self.context
        return flat if tokens <= start else base + slope * tokens

    def over_pairs(self, chunk: float, tokens: float) -> float:
        start, base, q, s, qs = self.pair
        return base + q * chunk + s * tokens + qs * chunk * tokens if chunk * tokens > start else 0.0

    def prefill(self, missed: float, context: float) -> float:
        if missed <= 0:
            return 0.0
        return self.start + self.linear(missed) + self.over_context(context) + self.over_pairs(missed, context)

    def decode_step(self, context: float, batch: float) -> float:
        return self.linear(batch) + self.over_context(context * batch) + batch * self.over_pairs(1, context)


@dataclass
class Hits:
    """Hits by the number of the window they fell into; those of the newest window and the one before it are known.

    A clock that jumped back counts into the newest window, unless there is nothing in it.
    """

    span: float
    windows: list[int] = field(default_factory=list)
    newest: int = 0

    def window(self, now: float) -> int:
        own = int(now / self.span) if now > 0 else 0
        return max(own, self.newest) if self.windows else own

    def roll(self, now: float) -> None:
        self.newest = self.window(now)
        self.windows = [window for window in self.windows if window >= self.newest - 1]

    def add(self, now: float) -> None:
        self.roll(now)
        self.windows.append(self.newest)

    def take(self, added_at: float, now: float) -> None:
        """Take one back that was added then, if its window is known still."""
        self.roll(now)
        then = int(added_at / self.span) if added_at > 0 else 0
        if then in self.windows:
            self.windows.remove(then)

    def recent(self, now: float) -> int:
        """Hits of this window and the one before."""
        return sum(self.windows.count(self.window(now) - ago) for ago in (0, 1))

    def estimate(self, now: float) -> float:
        """Hits within one span: the window before counts by the share of it that is still within."""
        window = self.window(now)
        is_own = now > 0 and window == int(now / self.span)
        gone = now / self.span - int(now / self.span) if is_own else 0.0
        return self.windows.count(window) + self.windows.count(window - 1) * (1.0 - gone)


@dataclass(eq=False)
class Mark:
    """One worker at one node: how many of the node's own tokens, counted from its start, it is estimated to cache."""

    tokens: int
    hits: Hits
    confirmed: bool = False
    near: int | None = None  # so many of them are in the GPU's memory; None: all
    far: bool = False  # and some of the rest not even in host memory

    @property
    def here(self) -> int:
        return self.tokens if self.near is None else self.near

    def cut(self, tokens: int) -> None:
        """Of its tokens, and of those in the GPU's memory, at most so many stay."""
        self.tokens = min(self.tokens, tokens)
        if self.near is not None and self.near >= self.tokens:
            self.near, self.far = None, False


@dataclass(eq=False)
class Node:
    """One node: who caches how much of it, how often it was hit by anybody, and who cached it last."""

    hits: Hits
    marks: dict[str, Mark] = field(default_factory=dict)
    home: Holder | None = None  # while nobody caches it


Holder = tuple[int, str]  # how often its cache had been cleared, and its name


class NaiveTree:
    """Nodes by whole prefix, and for each worker the nodes it caches from the least to the most recently used."""

    def __init__(self, span: float) -> None:
        self.span = span
        self.nodes: dict[Path, Node] = {}
        self.recency: dict[str, list[Path]] = {}
        self.capacity: dict[str, int] = {}
        self.told: set[str] = set()
        self.clears: dict[str, int] = {}
        self.below: dict[str, int] = {}
        self.moves: set[str] = set()  # whose engines report what leaves the GPU's memory for others

    # --- reads ---

    def start(self, path: Path) -> int:
        """Where the node's own tokens start: at the end of the longest other node on its way."""
        space, tokens = path
        ends = {len(node[1]) for node in self.nodes if node[0] == space}
        return max((n for n in ends if n < len(tokens) and (space, tokens[:n]) in self.nodes), default=0)

    def walk(self, path: Path) -> tuple[list[Path], int]:
        """(nodes that a prompt passes or ends in, from the top; tokens of it that are known)."""
        space, tokens = path
        shared = {node: common(node[1], tokens) for node in self.nodes if node[0] == space}
        passed = [node for node, matched in shared.items() if matched > self.start(node)]
        return sorted(passed, key=lambda node: len(node[1])), max(shared.values(), default=0)

    def goes_on(self, path: Path) -> bool:
        """Whether a prompt leads into one that no other has gone on from."""
        nodes, _ = self.walk(path)
        end = nodes[-1] if nodes else None
        return end is not None and not any(
            node != end and node[0] == end[0] and node[1][: len(end[1])] == end[1] for node in self.nodes
        )

    def above(self, path: Path) -> list[Path]:
        """The nodes that `path` contains as a whole, from the top; itself is the last."""
        space, tokens = path
        return [(space, tokens[:n]) for n in range(1, len(tokens) + 1) if (space, tokens[:n]) in self.nodes]

    def held(self, path: Path, worker: str) -> int:
        """Tokens of a prompt that the worker's marks cover without a gap."""
        nodes, known = self.walk(path)
        held = 0
        for node in nodes:
            mark = self.nodes[node].marks.get(worker)
            if mark is None:
                break
            held = min(self.start(node) + mark.tokens, known)
            if mark.tokens < len(node[1]) - self.start(node):
                break
        return held

    def confirmed(self, path: Path, worker: str) -> int:
        """Tokens of a prompt up to the deepest mark that the engine has confirmed."""
        nodes, known = self.walk(path)
        for node in reversed(nodes):
            mark = self.nodes[node].marks.get(worker)
            if mark is not None and mark.confirmed:
                return min(self.start(node) + mark.tokens, known)
        return 0

    def on_gpu(self, path: Path, worker: str, held: int) -> tuple[int, int]:
        """(of the tokens that the worker caches of a prompt, those in the GPU's memory before the first that is not;
        those of the rest in nodes that are not in host memory as a whole)."""
        end, far = held, 0
        for node in self.walk(path)[0]:
            mark = self.nodes[node].marks.get(worker)
            if mark is not None and self.start(node) + mark.here < min(self.start(node) + mark.tokens, held):
                end = min(end, self.start(node) + mark.here)
                far += (min(self.start(node) + mark.tokens, held) - self.start(node) - mark.here) * mark.far
        return end, far

    def away(self, worker: str) -> int:
        marks = [self.nodes[node].marks[worker] for node in self.recency[worker]]
        return sum(mark.tokens - mark.here for mark in marks)

    def homes(self, path: Path, share: float, places: list[str | None]) -> list[Holder]:
        """Who caches most of each node of the known part of a prompt, or cached it last, from the bottom up to where
        no more than a share of the prompt is left."""
        nodes, known = self.walk(path)
        homes = []
        for node in reversed(nodes):
            if known <= share * len(path[1]):
                break
            marks, home = self.nodes[node].marks, self.nodes[node].home
            if marks:
                worker = min(marks, key=lambda name: (-marks[name].tokens, places.index(name)))
                home = self.clears[worker], worker
            if home is not None and home == (self.clears.get(home[1]), home[1]):
                homes.append(home)
            known = self.start(node)
        return homes

    def cached(self, worker: str) -> int:
        return sum(self.nodes[node].marks[worker].tokens for node in self.recency[worker])

    def limit(self, worker: str) -> int:
        """What a worker may be estimated to hold: a quarter more than it can where its engine reports what it drops."""
        own = self.capacity[worker] + (self.capacity[worker] // 4 if worker in self.told else 0)
        return max(own, self.below[worker])

    def key_end(self, path: Path, limit: int) -> int:
        """End of the deepest node of the first `limit` tokens that is longer than all before it."""
        spans = [(self.start(node), min(len(node[1]), limit)) for node in self.walk(path)[0]]
        return next((end for start, end in reversed(spans) if end > start and end - start > start), 0)

    # --- writes ---

    def insert(self, path: Path, worker: str, now: float, is_hit: bool) -> None:
        nodes, known = self.walk(path)
        if nodes and known < len(nodes[-1][1]):
            self.split(nodes[-1], known)
        if known < len(path[1]):
            self.nodes[path] = Node(Hits(self.span))
        for node in reversed(self.above(path)):
            self.mark(node, worker, now, is_hit)
        self.settle(worker)

    def split(self, path: Path, end: int) -> None:
        """Give the tokens up to `end` a node of their own. Who cached past the border now caches two nodes."""
        node, start, top = self.nodes[path], self.start(path), (path[0], path[1][:end])
        upper = Node(copy.deepcopy(node.hits), home=node.home)
        if len(node.marks) == 1:
            node.home = self.clears[min(node.marks)], min(node.marks)
        elif node.marks:
            node.home = None
        for worker, mark in list(node.marks.items()):
            order = self.recency[worker]
            if mark.tokens <= end - start:
                upper.marks[worker] = node.marks.pop(worker)
                order[order.index(path)] = top
            else:
                upper.marks[worker] = Mark(end - start, copy.deepcopy(mark.hits), mark.confirmed, mark.near, mark.far)
                upper.marks[worker].cut(end - start)
                mark.tokens -= end - start
                if mark.near is not None:
                    mark.near = max(0, mark.near - (end - start))
                order.insert(order.index(path) + 1, top)
        self.nodes[top] = upper

    def mark(self, path: Path, worker: str, now: float, is_hit: bool) -> None:
        """The worker caches the whole node and has just used it."""
        node = self.nodes[path]
        mark = node.marks.setdefault(worker, Mark(0, Hits(self.span)))
        mark.tokens = len(path[1]) - self.start(path)
        if path in self.recency[worker]:
            self.recency[worker].remove(path)
        self.recency[worker].append(path)
        if is_hit:
            node.hits.add(now)
            mark.hits.add(now)

    def keep(self, path: Path, worker: str, tokens: int) -> None:
        """The worker keeps at most `tokens` of the node's own tokens."""
        mark = self.nodes[path].marks[worker]
        mark.cut(tokens)
        if mark.tokens <= 0:
            del self.nodes[path].marks[worker]
            self.nodes[path].home = self.clears[worker], worker
            self.recency[worker].remove(path)

    def evict(self, worker: str, need: int) -> None:
        while need > 0 and self.recency[worker]:
            oldest = self.recency[worker][0]
            tokens = self.nodes[oldest].marks[worker].tokens
            self.keep(oldest, worker, tokens - need)
            need -= tokens

    def learn(self, worker: str, told: bool) -> None:
        """Whether a worker's engine reports what it drops has just become clear."""
        (self.told.add if told else self.told.discard)(worker)
        self.settle(worker)

    def settle(self, worker: str) -> None:
        """What is over the limit is evicted; what is over the GPU's capacity goes to what lies below, if anything."""
        self.evict(worker, self.cached(worker) - self.limit(worker))
        need = self.cached(worker) - self.away(worker) - self.capacity[worker]
        late = worker in self.moves or worker in self.told
        if self.below[worker] == 0 or (late and need <= self.capacity[worker] // 4):
            return
        for node in self.recency[worker]:
            mark = self.nodes[node].marks[worker]
            gone = min(max(need, 0), mark.here)
            if gone:
                mark.near, need = mark.here - gone, need - gone

    # --- what is not in the GPU's memory ---

    def send_away(self, node: Path, worker: str, start: int, far: bool) -> None:
        mark = self.nodes[node].marks.get(worker)
        at = max(0, start - self.start(node))
        if mark is not None and at < mark.tokens:
            mark.near = min(at, mark.here)
            mark.far = mark.far or far

    def bring_back(self, path: Path, worker: str, start: int, end: int) -> None:
        """A part of a path is in the GPU's memory; the path was just used."""
        for node in reversed(self.above(path)):
            mark, first = self.nodes[node].marks.get(worker), self.start(node)
            if mark is None:
                continue
            if mark.near is not None and start <= first + mark.near < end:
                mark.near = end - first
                mark.cut(mark.tokens)
            self.recency[worker].remove(node)
            self.recency[worker].append(node)
        self.settle(worker)

    def bring_near(self, path: Path, worker: str, start: int, end: int) -> None:
        """A part of a path is in host memory."""
        for node in self.above(path):
            mark, first = self.nodes[node].marks.get(worker), self.start(node)
            if mark is not None and len(node[1]) > start and first + mark.tokens <= end and first + mark.here >= start:
                mark.far = False

    def expect_moves(self, worker: str) -> None:
        """A worker's engine reports what it keeps beside the GPU's memory."""
        if worker not in self.moves:
            self.moves.add(worker)
            self.below[worker] = self.below[worker] or 3 * self.capacity[worker]
            self.settle(worker)

    def unmark(self, path: Path, worker: str, kept: int) -> None:
        """The worker lost every prefix through position `kept` of the path."""
        space, tokens = path
        through = [p for p in self.recency[worker] if p[0] == space and common(p[1], tokens) > kept]
        for node in through:
            self.keep(node, worker, kept - self.start(node))

    def lose_block(self, path: Path, worker: str, start: int) -> None:
        """The worker lost the block that ends the path and begins at `start`. Of its tokens those stay with which
        another cached prefix leaves the path, because a block of that one begins alike."""
        ends = {node: self.start(node) + self.nodes[node].marks[worker].tokens for node in self.recency[worker]}
        cached = [node[1][:end] for node, end in ends.items() if node[0] == path[0]]
        shared = [common(other, path[1]) for other in cached]
        leaving = [n for other, n in zip(cached, shared, strict=True) if n < len(other) and n < len(path[1])]
        self.unmark(path, worker, max([start, *leaving]))

    def drop_beside(self, path: Path, worker: str, kept: int) -> None:
        """The worker lost what hangs off the path beyond its first `kept` tokens; the path itself stays."""
        own = self.above(path)
        for node in list(self.recency[worker]):
            if node not in own and node[0] == path[0] and common(node[1], path[1]) > kept:
                self.keep(node, worker, 0)

    def take_back(self, path: Path, worker: str, kept: int, booked_at: float, now: float) -> None:
        """A request was not computed: its hits go, and its marks beyond `kept` tokens that nobody else has used."""
        undo = True
        for node in reversed(self.above(path)):
            self.nodes[node].hits.take(booked_at, now)
            mark = self.nodes[node].marks.get(worker)
            if mark is None:
                continue
            mark.hits.take(booked_at, now)
            start = self.start(node)
            below = [p for p in self.recency[worker] if p[0] == node[0] and p != node and self.above(p).count(node)]
            undo = undo and start + mark.tokens > kept and mark.hits.recent(now) == 0 and not below
            if undo:
                self.keep(node, worker, kept - start)

    def evict_all(self, worker: str) -> bool:
        """A cache is empty; whether it was not."""
        cached = self.cached(worker)
        self.evict(worker, cached)
        self.clears[worker] += 1
        return cached > 0

    def may_go(self, path: Path, now: float) -> bool:
        """Whether a tick may forget this node: cached nowhere and unhit in this window and the one before."""
        return not self.nodes[path].marks and self.nodes[path].hits.recent(now) == 0


@dataclass(eq=False)
class Booking:
    """One request on one worker, live or not. `requests`, `prompt`, `output` are what it counts for in the window."""

    account: Account
    slice: int
    booked_at: float
    path: Path
    node: Node
    prompt_tokens: int
    matched: int
    confirmed: int
    expected_output: int
    prefill_ns: int
    prefilled: bool = False
    told: bool = False
    counts: bool = True
    output: int = 0
    observed: int | None = None
    renewed_at: float = -1e99
    loaded: tuple[int, int] = (0, 0)
    alone: bool = False
    first_at: float = math.nan


@dataclass(eq=False)
class Account:
    """One worker: its spec, since when it is here, and every request it was ever given."""

    spec: WorkerSpec
    cost: NaiveCost
    joined_at: float
    bookings: list[Booking] = field(default_factory=list)
    live: list[Booking] = field(default_factory=list)
    eligible: bool = True
    output_token_seconds: float = 0.0
    working_since: float = 0.0
    stay: float = 0.0  # how long requests keep a place, lately
    blocks: dict[Hashable, StoredBlock] = field(default_factory=dict)
    accuracy: NaiveAccuracy = field(init=False)
    loads: list[tuple[float, tuple[int, int]]] = field(default_factory=list)  # (seconds late, tokens by medium)
    stated: tuple[float, float] = (0.0, 0.0)

    def rates(self) -> list[float]:
        """Seconds to load a token from host memory and from disk, worked out from all that was seen."""
        weight = 4.0 * 4096.0**2  # what is stated counts as four loads of 4,096 tokens do
        rates, products, squares = list(self.stated), [weight * one for one in self.stated], [weight, weight]
        late = count = 0.0
        for seconds, tokens in self.loads:
            if not any(tokens):
                count = count * 0.98 + 1.0
                late += (seconds - late) / count
                continue
            own = [seconds - late - rates[1 - i] * tokens[1 - i] for i in range(2)]
            for i in range(2):
                if tokens[i]:
                    products[i] = products[i] * 0.98 + tokens[i] * own[i]
                    squares[i] = squares[i] * 0.98 + tokens[i] ** 2
            rates = [max(0.0, products[i] / squares[i]) if tokens[i] else rates[i] for i in range(2)]
        return rates

    def load_seconds(self, host: int, disk: int) -> float:
        rates = self.rates()
        return rates[0] * host + rates[1] * disk

    def __post_init__(self) -> None:
        self.accuracy = NaiveAccuracy(self.spec.block_size)


@dataclass(eq=False)
class StoredBlock:
    """One block an engine has named: the whole prefix it ends, where its own tokens start, where its copies are."""

    path: Path
    start: int
    parent: Hashable
    media: set[str]


@dataclass(frozen=True)
class Prices:
    """What is the same for all workers in one decision."""

    pressure: float
    repeated_pressure: float  # by how much it is more for what is computed again
    best: int  # tokens of the prompt that somebody caches, at most all but the last
    output: int
    evicted_uses: float
    passed: float  # of what is ahead, by token of the prompt that is cached
    fleet: list[Account]  # the workers that take requests


@dataclass(frozen=True)
class Row:
    """One worker's terms."""

    worker: str
    whole: int
    matched: int
    load: float
    prefill: float
    queue: float
    others: float
    decode: float
    eviction: float
    balance: float
    live: int
    tie: tuple[float, ...]
    loading: float
    loaded: tuple[int, int]
    must_evict: bool = False
    repeated: float = 0.0  # of `others`
    credit: float = 0.0

    @property
    def total(self) -> float:
        terms = self.queue + self.prefill + self.others + self.decode + self.eviction + self.balance
        return terms + self.loading + self.credit


@dataclass(frozen=True)
class Choice:
    """What the model would do."""

    worker: str
    reason: str
    rows: list[Row]
    credited: tuple[Node, float] | None = None  # what is saved up for copies of a prefix, once this is booked
    or_else: Choice | None = None  # what it would do as well, were one of the prices another in its last bits

    def total(self, worker: str) -> float:
        return next(row.total for row in self.rows if row.worker == worker)


class NaiveScheduler:
    """The scheduler's bookings and its E2 rule. Times are arguments."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.tree = NaiveTree(config.history_seconds)
        self.places: list[str | None] = []  # worker by index: ties go to the lowest
        self.placed: set[Hashable] = set()  # blocks of unknown parents whose place the core still has
        self.accounts: dict[str, Account] = {}
        self.live: dict[Hashable, Booking] = {}
        self.slice = -1
        self.faded_at = 0.0
        self.credits: dict[Node, tuple[float, float]] = {}  # seconds saved up for copies, and when
        self.others = 0.0  # share of the bookings that other routers placed, lately

    # --- time and sums ---

    def advance(self, now: float) -> None:
        """Time moves in slices, forwards only; what one output token costs is looked at once a slice."""
        at = int(now / (self.config.history_seconds / SLICES)) if now > 0 else 0
        if at > self.slice:
            self.slice = at
            self.retune()

    def retune(self) -> None:
        live = sum(len(account.live) for account in self.accounts.values())
        batch = min(64.0, max(8.0, live / max(1, len(self.accounts))))
        for account in self.accounts.values():
            seen = [booking for booking in self.window(account) if booking.counts]
            context = sum(booking.prompt_tokens for booking in seen) / max(1, len(seen))
            account.output_token_seconds = account.cost.decode_step(context, batch) / batch

    @property
    def output_seconds(self) -> float:
        """Of an output token, mean of the workers."""
        each = [account.output_token_seconds for account in self.accounts.values()]
        return sum(each) / max(1, len(each))

    def window(self, account: Account) -> list[Booking]:
        return [booking for booking in account.bookings if self.slice - booking.slice < SLICES]

    def sums(self, account: Account) -> dict[str, float]:
        """The account as `stats` shows it."""
        seen, waiting = self.window(account), [b for b in account.live if not b.prefilled]
        observed = [b.observed for b in seen if b.observed is not None]
        prefill_ns, output = sum(b.prefill_ns for b in seen), sum(b.output for b in seen)
        return {
            "live_requests": len(account.live),
            "waiting_requests": len(waiting),
            "waiting_prefill_seconds": sum(b.prefill_ns for b in waiting) * 1e-9,
            "place_wait_seconds": self.place_wait(account),
            "live_output_tokens": sum(b.expected_output for b in account.live),
            "live_prompt_tokens": sum(b.prompt_tokens for b in account.live),
            "window_requests": sum(b.counts for b in seen),
            "window_prefill_seconds": prefill_ns * 1e-9,
            "window_output_tokens": output,
            "load_seconds": prefill_ns * 1e-9 + output * account.output_token_seconds,
            "mean_output_tokens": sum(observed) / max(1, len(observed)),
            "cached_tokens": self.tree.cached(account.spec.id),
        }

    def expected_output(self, account: Account, limit: int | None) -> int:
        """Rounded mean of the worker, else of all workers, else 128; at most what the client allows."""
        own = [b.observed for b in self.window(account) if b.observed is not None]
        everyone = [b.observed for a in self.accounts.values() for b in self.window(a) if b.observed is not None]
        return self.expected(own or everyone, limit)

    def expected_anywhere(self, limit: int | None) -> int:
        """The same before a worker is chosen."""
        return self.expected([b.observed for a in self.accounts.values() for b in self.window(a)], limit)

    def expected(self, seen: list[int | None], limit: int | None) -> int:
        known = [tokens for tokens in seen if tokens is not None]
        expected = (sum(known) + len(known) // 2) // len(known) if known else 128
        return expected if limit is None else min(expected, limit)

    # --- the decision ---

    def decide(self, path: Path, limit: int | None, now: float, excluded: Iterable[str] = ()) -> Choice:
        """E2: who would take this prompt, and what everybody's terms are."""
        self.advance(now)
        names = [name for name in self.places if name and self.accounts[name].eligible and name not in excluded]
        length = len(path[1])
        held = {name: self.estimated(path, name) for name in names}
        whole = {name: held[name] - held[name] % self.accounts[name].spec.block_size for name in names}
        longest = max(whole.values())
        enough = longest > self.config.exploit_ratio * length
        least_held = max(1, int(HOLDER_SHARE_MIN * longest))
        prices = self.prices(path, longest, limit, now, [self.accounts[name] for name in names])
        rows = [self.row(name, path, held[name], prices, now) for name in names]
        if not enough:
            homes = self.tree.homes(path, self.config.exploit_ratio, self.places)
            kept = [name for name in names if self.accounts[name].accuracy.eighths == 8]
            there = next((name for _, name in homes if name in kept), None)
            if there is not None and held[there] >= longest:
                rows = [row if row.worker == there else self.moved(row, there, prices) for row in rows]
            best = min(rows, key=lambda row: (row.total, row.tie))
            agreed = self.agreed(rows, best, path[1], longest, math.inf, prices, now)
            return Choice(agreed.worker, "explore" if agreed is best else "rendezvous", rows)
        rows = [row if row.whole >= least_held else replace(row, eviction=row.eviction + COPY_SECONDS) for row in rows]
        home = min((row for row in rows if row.whole >= least_held), key=lambda row: (row.total, row.tie))
        nodes = self.tree.walk(path)[0]
        node = self.tree.nodes[next(node for node in nodes if len(node[1]) >= least_held)]
        saved, at = self.credits.get(node, (0.0, 0.0))
        every, holders = prices.fleet, [self.accounts[row.worker] for row in rows if row.whole >= least_held]
        there = self.accounts[home.worker]
        share = home.total - home.eviction - home.balance - home.loading
        share += self.mean_price(home, length, prices, holders, sum(self.wait(one, 1.0, now) for one in holders))
        share -= self.mean_price(home, length, prices, [there], self.wait(there, 1.0, now))
        share -= self.mean_price(home, length, prices, every, sum(self.outstanding(one) for one in every))
        share *= len(every) / max(1, len(every) - len(holders))
        credit = saved * math.exp(-max(now - at, 0.0) / CREDIT_AGE_SECONDS) + share * (len(holders) < len(every))
        credit = max(0.0, credit)
        plain, rows = (
            rows,
            [row if row.whole >= least_held else self.credited(row, home, length, credit, prices, now) for row in rows],
        )
        best = min(rows, key=lambda row: (row.total, row.tie))
        unseen = UNSEEN_DELAYS * self.config.peer_delay_seconds * self.others
        bound = min(row.total + DRAW_QUEUE_WEIGHT * row.queue for row in rows if row.whole >= least_held)

        def left_for(other: Row) -> Choice:
            chosen = self.agreed(plain, other, path[1], longest, bound, prices, now).worker
            return Choice(chosen, "escape", rows, (node, 0.0))

        stays = Choice(home.worker, "exploit", rows, (node, credit))
        choice = stays if home.total - best.total <= unseen else left_for(best)
        rival = min(
            (row for row in rows if row.worker != home.worker), key=lambda row: (row.total, row.tie), default=home
        )
        if rival is home or not math.isclose(home.total, rival.total + unseen, rel_tol=SAME_TO):
            return choice
        return replace(choice, or_else=left_for(rival) if choice is stays else stays)

    def moved(self, row: Row, home: str, prices: Prices) -> Row:
        """What is known has its home elsewhere: it may go to a worker of another kind that has room for it."""
        if not row.must_evict and vars(self.accounts[row.worker].cost) != vars(self.accounts[home].cost):
            return row
        wait = sum(self.outstanding(one) for one in prices.fleet) / len(prices.fleet)
        return replace(row, eviction=row.eviction + min(MOVED_USES * row.prefill * (1.0 + prices.pressure), wait))

    def mean_price(
        self, home: Row, length: int, prices: Prices, accounts: Collection[Account], ahead_seconds: float
    ) -> float:
        """What a worker with the mean of these is worth to a request, if it caches what the best holder does."""
        live = [booking for account in accounts for booking in account.live]
        ahead, requests = ahead_seconds / len(accounts), len(live) / len(accounts)
        context = TOGETHER_SHARE * prices.output * self.accounts[home.worker].cost.context[3]
        return (
            (ahead + min(ahead, BEHIND_SECONDS)) * self.still_ahead(home.worker, home.matched, prices)
            + REQUEST_SECONDS * requests
            + home.prefill * (1.0 + prices.pressure + INTERRUPTED_SHARE * requests)
            + context * (length * requests + sum(b.prompt_tokens for b in live) / len(accounts))
        )  # fmt: skip

    def still_ahead(self, name: str, matched: int, prices: Prices) -> float:
        """How much of what is ahead a prompt waits for on a worker that caches so much of it."""
        return 1.0 - prices.passed * matched if self.accounts[name].spec.cached_first else 1.0

    def waiting(self, account: Account) -> float:
        """Seconds of prefill that were given to a worker and not reported done."""
        return sum(booking.prefill_ns for booking in account.live if not booking.prefilled) * 1e-9

    def place_wait(self, account: Account) -> float:
        """Seconds until a place is free for one more, in whole microseconds."""
        places, live = account.spec.max_running or 0, len(account.live)
        if not places or live < places:
            return 0.0
        return int(min(live + 1 - places, TURN_SHARE * places) * account.stay / places * 1e6) * 1e-6

    def outstanding(self, account: Account) -> float:
        """Seconds that one more request waits there, as the fleet's mean has it."""
        return max(self.waiting(account), self.place_wait(account))

    def ahead(self, account: Account, now: float) -> float:
        """What is left of it, estimated."""
        waiting = sum(not booking.prefilled for booking in account.live)
        given = self.waiting(account)
        done = min(WORK_SHARE * max(now - account.working_since, 0.0), given / max(waiting, 1))
        return max(given - done, 0.0)

    def wait(self, account: Account, stays: float, now: float) -> float:
        """For what is ahead, of which such a share stays ahead, or for a place, whichever is longer."""
        return max(self.ahead(account, now) * stays, self.place_wait(account))

    def credited(self, row: Row, home: Row, length: int, credit: float, prices: Prices, now: float) -> Row:
        """What a copy costs on this worker is taken off where it is saved up, and drives out nothing that was used
        again."""
        cost = self.accounts[row.worker].cost
        price = row.prefill - cost.prefill(length - home.matched, length)
        price *= 1.0 + prices.pressure + INTERRUPTED_SHARE * row.live
        price += max(0.0, row.eviction - home.eviction) + row.repeated
        if not 0.0 < price <= credit:
            return row
        kept = row.must_evict and self.drives_out_reused(row.worker, length - row.matched + prices.output, now)
        return row if kept else replace(row, credit=-price)

    def drives_out_reused(self, worker: str, need: int, now: float) -> bool:
        """Whether of what a worker used longest ago something must go that was asked for more than once."""
        account = self.accounts[worker]
        if self.tree.below[worker]:
            return False
        promised = sum(booking.expected_output for booking in account.live)
        need += self.tree.cached(worker) + promised - account.spec.kv_capacity_tokens
        for node in self.tree.recency[worker][:DRIVEN_OUT_LOOKED]:
            if need <= 0:
                return False
            if self.tree.nodes[node].marks[worker].hits.estimate(now) > REUSED_HITS:
                return True
            need -= len(node[1]) - self.tree.start(node)
        return need > 0 and len(self.tree.recency[worker]) < DRIVEN_OUT_LOOKED

    def agreed(
        self, rows: list[Row], best: Row, tokens: Tokens, held: int, bound: float, prices: Prices, now: float
    ) -> Row:
        """Where other routers place requests, too: a draw, the same for prompts that go on alike, with weights that
        bring all they touch to one level."""
        if self.others == 0.0:
            return best
        unseen = UNSEEN_DELAYS * self.config.peer_delay_seconds * self.others
        unseen *= self.assigned() / self.longest_observed(now)
        unseen += best.prefill * (1.0 + prices.pressure)
        heights = {row.worker: row.total + DRAW_QUEUE_WEIGHT * row.queue for row in rows}
        lowest = sorted(heights.values())
        level = min(bound, *((sum(lowest[:count]) + unseen) / count for count in range(1, len(lowest) + 1)))
        start = head = min(held, len(tokens) - 1)
        for token in tokens[start : start + HEAD_TOKENS]:
            head = mixed((head + token) % 2**64)
        best_score = 0.0
        for row in rows:
            drawn = mixed(head ^ mixed(crc32(row.worker.encode())))
            weight = level - heights[row.worker]
            score = weight / -math.log(((drawn >> 12) + 0.5) / 2**52)
            if weight > WEIGHT_MIN and score > best_score:
                best, best_score = row, score
        return best

    def row(self, name: str, path: Path, held: int, prices: Prices, now: float) -> Row:
        account, length = self.accounts[name], len(path[1])
        whole = held - held % account.spec.block_size
        usable = self.usable(name, held, length)
        loading, loaded = self.loading(path, name, held)
        load = self.sums(account)["load_seconds"] * self.newcomer_factor(account, now)
        prefill = account.cost.prefill(length - usable, length)
        live, known = len(account.live), self.tree.confirmed(path, name)
        stays = self.still_ahead(name, usable, prices)
        behind = max(0.0, self.waiting(account) - account.cost.prefill(usable - known, usable))
        context = TOGETHER_SHARE * prices.output * account.cost.context[3]
        promised = sum(booking.expected_output for booking in account.live)
        here = self.tree.cached(name) - self.tree.away(name)
        again = prices.evicted_uses * prefill * (1.0 + prices.pressure)

        def lacking(capacity: int, cached: int) -> float:
            need = length - usable + prices.output - max(0, capacity - cached - promised)
            return min(1.0, max(0.0, need / (length - usable)))

        eviction = lacking(account.spec.kv_capacity_tokens, here) * again
        if self.tree.below[name]:
            there = max(self.tree.below[name], account.spec.kv_capacity_tokens)
            gone = min(eviction, lacking(there, self.tree.cached(name)) * again)
            tokens = length - usable + sum(loaded) + prices.output
            eviction = gone + min(eviction - gone, prices.evicted_uses * account.load_seconds(tokens, 0))
        must_evict = lacking(account.spec.kv_capacity_tokens, here) > 0.0
        least = account.cost.prefill(length - prices.best, length)
        waiting = sum(not booking.prefilled for booking in account.live)
        rounds = max(FLEET_ROUNDS * prices.repeated_pressure, WAITING_ROUNDS * waiting)
        repeated = max(0.0, prefill - least) * rounds * (must_evict and usable < prices.best)
        return Row(
            *(name, whole, usable, load, prefill),
            queue=self.wait(account, stays, now) + min(behind, BEHIND_SECONDS) * stays + REQUEST_SECONDS * live,
            others=prefill * (prices.pressure + INTERRUPTED_SHARE * live) + context * length * live + repeated,
            decode=context * sum(booking.prompt_tokens for booking in account.live),
            eviction=eviction,
            must_evict=must_evict,
            repeated=repeated,
            balance=LOAD_SHARE * load * min(1.0, load / (0.5 * self.longest_observed(now))),
            live=live,
            tie=(-usable, live, self.tree.cached(name), self.places.index(name)),
            loading=loading,
            loaded=loaded,
        )

    def usable(self, name: str, held: int, length: int) -> int:
        """What can be used of so many tokens, in whole blocks, at most all but one."""
        usable = min(held, length - 1)
        return usable - usable % self.accounts[name].spec.block_size

    def loading(self, path: Path, name: str, held: int) -> tuple[float, tuple[int, int]]:
        """(seconds to load what is used of a prompt and is not in the GPU's memory, its tokens by medium)."""
        here, far = self.tree.on_gpu(path, name, held)
        loaded = self.usable(name, held, len(path[1])) - self.usable(name, here, len(path[1]))
        disk = min(far, loaded)
        return self.accounts[name].load_seconds(loaded - disk, disk), (loaded - disk, disk)

    def assigned(self, fleet: Collection[Account] = ()) -> float:
        """Seconds of work given to all workers within the window, or to some of them."""
        if 0 < len(fleet) < len(self.accounts):
            return sum(self.sums(account)["load_seconds"] for account in fleet)
        every = [booking for account in self.accounts.values() for booking in self.window(account)]
        return sum(b.prefill_ns for b in every) * 1e-9 + sum(b.output for b in every) * self.output_seconds

    def prices(self, path: Path, longest: int, limit: int | None, now: float, fleet: list[Account]) -> Prices:
        """What is the same for all workers, of which these take requests and one caches so much."""
        rho = self.assigned(fleet) / (self.longest_observed(now) * len(fleet))
        recent = [b for account in self.accounts.values() for b in self.window(account) if b.counts]
        matched, prompts = sum(b.matched for b in recent), sum(b.prompt_tokens for b in recent)
        whole = min(REPEATED_MAX, rho / (1.0 - min(rho, 0.9)))
        return Prices(
            pressure=min(PRESSURE_MAX, whole),
            repeated_pressure=max(0.0, whole - PRESSURE_MAX),
            best=min(longest, len(path[1]) - 1),
            output=self.expected_anywhere(limit),
            evicted_uses=EVICTED_USES * (matched / max(prompts, 1)),
            passed=PASSED_SHARE / len(path[1]) if self.tree.goes_on(path) else 0.0,
            fleet=fleet,
        )

    def longest_observed(self, now: float) -> float:
        """How long the oldest worker was seen."""
        least, most = min(self.config.join_seconds, self.config.history_seconds), self.config.history_seconds
        return min(most, max([least, *(now - other.joined_at for other in self.accounts.values())]))

    def newcomer_factor(self, account: Account, now: float) -> float:
        """A worker seen for less time than the oldest one is scaled up to it, from at least `join_seconds`."""
        longest = self.longest_observed(now)
        observed = max(min(self.config.join_seconds, self.config.history_seconds), now - account.joined_at)
        return longest / observed if observed < longest else 1.0

    # --- a request's life ---

    def book(
        self,
        request_id: Hashable,
        path: Path,
        worker: str,
        limit: int | None,
        now: float,
        from_peer: bool = False,
        credited: tuple[Node, float] | None = None,
    ) -> None:
        self.advance(now)
        if credited is not None:
            self.credits[credited[0]] = credited[1], now
        account, length = self.accounts[worker], len(path[1])
        others = self.others + (from_peer - self.others) / PLACED_LATELY
        self.others = others if others > OTHERS_MIN else 0.0
        held = self.estimated(path, worker)
        usable = self.usable(worker, held, length)
        _, loaded = self.loading(path, worker, held)
        confirmed = self.tree.confirmed(path, worker)
        expected = self.expected_output(account, limit)
        prefill_ns = int(account.cost.prefill(length - usable, length) * 1e9)
        self.tree.insert(path, worker, now, is_hit=True)
        node = self.tree.nodes[path]
        booking = Booking(
            *(account, self.slice, now, path, node, length, usable, confirmed, expected, prefill_ns),
            output=expected,
            loaded=loaded,
            alone=all(other.prefilled for other in account.live),
        )
        if all(other.prefilled for other in account.live):
            account.working_since = now
        account.bookings.append(booking)
        account.live.append(booking)
        self.live[request_id] = booking

    def is_current(self, booking: Booking) -> bool:
        return self.accounts.get(booking.account.spec.id) is booking.account

    def is_remembered(self, booking: Booking) -> bool:
        return self.tree.nodes.get(booking.path) is booking.node

    def first_token(self, request_id: Hashable, cached: int | None, now: float) -> bool:
        booking = self.live.get(request_id)
        if booking is not None and self.is_current(booking):
            self.learn_load(booking, cached, now)
        return self.seen_first(request_id, cached, now)

    def learn_load(self, booking: Booking, cached: int | None, now: float) -> None:
        """How late a first token came that waited for nothing but its own load and prefill."""
        account, worker = booking.account, booking.account.spec.id
        waiting = [other for other in account.live if not other.prefilled]
        found_all = booking.alone and waiting == [booking] and (cached is None or cached >= booking.matched)
        more = (cached or 0) > booking.matched + account.spec.block_size  # loaded, though that takes longer
        if found_all and (self.tree.below[worker] or self.tree.away(worker)) and (any(booking.loaded) or not more):
            account.loads.append((now - booking.booked_at - booking.prefill_ns * 1e-9, booking.loaded))

    def seen_first(self, request_id: Hashable, cached: int | None, now: float) -> bool:
        booking = self.live.get(request_id)
        if booking is None:
            return False
        self.advance(now)
        if self.is_current(booking):
            self.correct(booking, cached, now)
            self.seen_done(booking, now)
            if not booking.prefilled:
                booking.first_at = now
            booking.prefilled = True
        return True

    def seen_done(self, booking: Booking, now: float) -> None:
        """It waits no longer: what its worker has done of the others is counted anew."""
        if not booking.prefilled:
            booking.account.working_since = now

    def estimated(self, path: Path, worker: str) -> int:
        """What a decision makes of a worker's marks."""
        held = self.accounts[worker].accuracy.estimated(self.tree.held(path, worker))
        here, length, cost = self.tree.on_gpu(path, worker, held)[0], len(path[1]), self.accounts[worker].cost
        missed = [length - self.usable(worker, tokens, length) for tokens in (held, here)]
        computed = self.loading(path, worker, held)[0] + cost.prefill(missed[0], length)
        return here if computed > cost.prefill(missed[1], length) else held

    def fade(self, now: float) -> None:
        """What reports have taught loses weight; with a third of the window as its half-life."""
        for account in self.accounts.values():
            account.accuracy.fade(max(0.0, now - self.faded_at), self.config.history_seconds / 3)
        self.faded_at = now

    def learn(self, booking: Booking, cached: int | None) -> None:
        accuracy, length = booking.account.accuracy, booking.prompt_tokens
        if not booking.prefilled:
            accuracy.prompt_done(length, booking.matched, cached)
        if cached is not None and not booking.told:
            booking.told = True
            marked = self.is_remembered(booking) and self.tree.held(booking.path, booking.account.spec.id) == length
            accuracy.reported(length, booking.matched, booking.confirmed, cached, marked)
        self.tree.learn(booking.account.spec.id, accuracy.on_events)

    def correct(self, booking: Booking, cached: int | None, now: float) -> None:
        worker = booking.account.spec.id
        self.learn(booking, cached)
        if cached is not None:
            missed = booking.prompt_tokens - cached
            booking.prefill_ns = int(booking.account.cost.prefill(missed, booking.prompt_tokens) * 1e9)
            lies = cached < min(booking.matched, booking.confirmed) and not booking.account.accuracy.on_events
            if self.is_remembered(booking) and lies:
                self.tree.drop_beside(booking.path, worker, cached)
            booking.confirmed = min(booking.confirmed, cached)
        if self.is_remembered(booking) and not booking.prefilled:
            if self.tree.held(booking.path, worker) < booking.prompt_tokens:
                self.tree.insert(booking.path, worker, now, is_hit=False)
            for node in self.tree.above(booking.path):
                if worker in self.tree.nodes[node].marks:
                    self.tree.nodes[node].marks[worker].confirmed = True
            if self.tree.away(worker):
                self.tree.bring_back(booking.path, worker, 0, booking.prompt_tokens)

    def finish(self, request_id: Hashable, output: int | None, cached: int | None, now: float) -> bool:
        booking = self.live.get(request_id)
        if booking is None:
            return False
        if cached is not None or not booking.prefilled:
            self.seen_first(request_id, cached, now)
        self.advance(now)
        del self.live[request_id]
        booking.account.live.remove(booking)
        account, stay = booking.account, now - booking.first_at + booking.prefill_ns * 1e-9
        if account.spec.max_running and now > booking.first_at:
            account.stay = account.stay + STAY_SHARE * (stay - account.stay) if account.stay else stay
        if output is not None:
            booking.output = booking.observed = output
        return True

    def cancel(self, request_id: Hashable, now: float) -> bool:
        booking = self.live.pop(request_id, None)
        if booking is None:
            return False
        self.advance(now)
        worker = booking.account.spec.id
        if self.is_current(booking) and not booking.prefilled and self.is_remembered(booking):
            known = self.tree.confirmed(booking.path, worker)
            self.tree.take_back(booking.path, worker, known, booking.booked_at, now)
        self.seen_done(booking, now)
        booking.account.live.remove(booking)
        booking.counts, booking.output = False, 0
        if not booking.prefilled:
            booking.account.bookings.remove(booking)
        return True

    def renew(self, request_id: Hashable, now: float) -> None:
        self.live[request_id].renewed_at = max(self.live[request_id].renewed_at, now)

    def expire_leases(self, now: float) -> int:
        """Cancel from the oldest on, up to the first that is young enough and from before now, what was not renewed;
        returns how many."""
        old = []
        for request_id, booking in self.live.items():
            if 0 <= now - booking.booked_at <= self.config.lease_seconds:
                break
            if now - max(booking.booked_at, booking.renewed_at) > self.config.lease_seconds:
                old.append(request_id)
        return sum(self.cancel(request_id, now) for request_id in old)

    def reconcile(self, worker: str, told: list[Hashable], grace: float, now: float) -> list[Hashable]:
        """The worker has these requests and no others of its own, but for what was seen within the grace. Other
        routers end their own."""
        own = [rid for rid, booking in self.live.items() if booking.account is self.accounts[worker]]
        for request_id in told:
            if request_id in own or not self.is_current(self.live[request_id]):
                self.renew(request_id, now)
        seen = {rid: max(self.live[rid].booked_at, self.live[rid].renewed_at) for rid in own}
        gone = [rid for rid in own if not is_peer(rid) and rid not in told and seen[rid] < now - grace]
        for request_id in gone:
            self.cancel(request_id, now)
        return gone

    # --- workers and their caches ---

    def add_worker(self, spec: WorkerSpec, now: float) -> None:
        self.tree.recency[spec.id], self.tree.capacity[spec.id] = [], spec.kv_capacity_tokens
        self.tree.clears.setdefault(spec.id, 0)
        self.tree.below[spec.id] = spec.below_capacity_tokens
        self.tree.moves.discard(spec.id)
        self.tree.learn(spec.id, False)
        if None not in self.places:
            self.places.append(None)
        self.places[self.places.index(None)] = spec.id
        self.advance(now)
        self.accounts[spec.id] = Account(spec, NaiveCost(spec.cost_model), now)
        self.accounts[spec.id].stated = self.config.host_token_seconds, self.config.disk_token_seconds
        self.retune()

    def remove_worker(self, worker: str, now: float) -> list[Hashable]:
        self.tree.evict_all(worker)
        orphans = [rid for rid, booking in self.live.items() if booking.account is self.accounts[worker]]
        self.places[self.places.index(worker)] = None
        del self.accounts[worker]
        for request_id in filter(is_peer, orphans):
            self.cancel(request_id, now)
        return [request_id for request_id in orphans if not is_peer(request_id)]

    def apply(self, worker: str, event: object, now: float) -> None:
        account = self.accounts[worker]
        if isinstance(event, BlockStored):
            self.store(account, event, now)
        elif isinstance(event, BlockRemoved):
            self.remove_blocks(account, event)
        elif isinstance(event, AllBlocksCleared):
            account.blocks.clear()
            if self.tree.evict_all(worker):
                account.accuracy.cleared()
        elif isinstance(event, PrefixEvicted):
            self.evicted(worker, event)
        self.tree.learn(worker, account.accuracy.on_events)

    def evicted(self, worker: str, event: PrefixEvicted) -> None:
        path = (event.namespace, tuple(event.token_ids))
        if event.moved_to is None:
            self.tree.unmark(path, worker, event.kept_tokens)
            return
        nodes, known = self.tree.walk(path)
        for node in nodes if known > event.kept_tokens else []:
            if len(node[1]) > event.kept_tokens:
                self.tree.send_away(node, worker, event.kept_tokens, not event.moved_to.startswith("CPU"))
        self.tree.expect_moves(worker)

    def place_copies(self, account: Account, run: list[StoredBlock], path: Path, start: int, medium: str) -> None:
        """A run's blocks have one copy more."""
        worker = account.spec.id
        if medium == "GPU":
            if self.tree.away(worker):
                self.tree.bring_back(path, worker, start, len(path[1]))
            return
        self.tree.expect_moves(worker)
        if medium.startswith("CPU"):
            self.tree.bring_near(path, worker, start, len(path[1]))
        for block in run:
            self.place_copy(worker, block)

    def place_copy(self, worker: str, block: StoredBlock) -> None:
        """A block is not in the GPU's memory, if no copy of it is."""
        nodes = [node for node in self.tree.walk(block.path)[0] if len(node[1]) >= len(block.path[1])]
        if "GPU" not in block.media and nodes:
            self.tree.send_away(nodes[0], worker, block.start, not any(m.startswith("CPU") for m in block.media))

    def store(self, account: Account, event: BlockStored, now: float) -> None:
        parent = event.parent_block_hash
        if parent is not None and not self.is_whole(account, parent):
            return
        tokens = account.blocks[parent].path[1] if parent is not None else ()
        run, before = [], len(tokens)
        for i, block_hash in enumerate(event.block_hashes):
            start = len(tokens)
            tokens += tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size])
            block = StoredBlock((event.namespace, tokens), start, parent, set())
            run.append(account.blocks.setdefault(block_hash, block))
            run[-1].media.add(event.medium or "GPU")
            parent = block_hash
        if event.block_hashes or event.parent_block_hash is not None:
            account.accuracy.stored()
        if tokens:
            self.tree.insert((event.namespace, tokens), account.spec.id, now, is_hit=False)
            for node in self.tree.above((event.namespace, tokens)):
                if account.spec.id in self.tree.nodes[node].marks:
                    self.tree.nodes[node].marks[account.spec.id].confirmed = True
            self.place_copies(account, run, (event.namespace, tokens), before, event.medium or "GPU")

    def is_whole(self, account: Account, block_hash: Hashable) -> bool:
        """Whether a block and every block before it are known."""
        while block_hash in account.blocks and account.blocks[block_hash].parent is not None:
            block_hash = account.blocks[block_hash].parent
        return block_hash in account.blocks

    def remove_blocks(self, account: Account, event: BlockRemoved) -> None:
        """Where the last copy goes, the tokens from the block's start on are lost. Of a block whose parents are unknown
        nobody can say where it stands, unless its place has been kept (`placed`)."""
        medium, worker = event.medium or "GPU", account.spec.id
        known = list(dict.fromkeys(key for key in event.block_hashes if key in account.blocks))
        blocks = {key: account.blocks[key] for key in known if medium in account.blocks[key].media}
        placed = {key for key in blocks if self.is_whole(account, key) or key in self.placed}
        stays = self.tree.below[worker] and worker not in self.tree.moves and medium == "GPU"
        for key, block in blocks.items():
            block.media.discard(medium)
            if not block.media:
                del account.blocks[key]
            if key not in placed:
                continue
            if block.media and (medium == "GPU" or not any(m.startswith("CPU") for m in block.media)):
                self.place_copy(worker, block)
            elif not block.media and stays:
                block.media.add("CPU")
                self.place_copy(worker, block)
            elif not block.media:
                self.tree.lose_block(block.path, worker, block.start)
