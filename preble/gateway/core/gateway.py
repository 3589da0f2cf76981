"""What the handlers share: the router, the tokenizer, the bounds, and one request's way from prompt to pieces.

Owns admission (bounds on live requests and choices), the prompt's length against the model's, and the names of the
served model. Knows no endpoint's shape.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...clock import Clock, monotonic
from ...router.router import Router
from ...types import SamplingParams
from ..dashboard.state import Live
from ..text.choices import ChoiceJob, RequestProgress, TextPiece, jobs_for
from ..text.generation import pieces
from ..text.tokenizing import Piece, PromptTooLong, TextCodec
from ..text.unread import UnreadBudget, UnreadPieces
from .byte_budget import ByteBudget
from .http_errors import unavailable, wrong
from .models import Models
from .request_context import RequestContext
from .sibling_processes import GatewayProcesses

if TYPE_CHECKING:
    from ..discovery.discovery import Discovery
    from .config import GatewayConfig
    from .metrics import Metrics
    from .tracing import Tracing

TokenIds = npt.NDArray[np.int32]
UNREAD_BYTES_MAX = 64 << 20  # output that clients have not read, of all requests


class Gateway:
    """One gateway. Belongs to one asyncio loop."""

    def __init__(
        self,
        router: Router,
        codec: TextCodec | None,
        config: GatewayConfig,
        metrics: Metrics,
        clock: Clock = monotonic,
        *,
        processes: GatewayProcesses | None = None,
        tracing: Tracing | None = None,
        admin_token: str | None = None,
        discovery: Discovery | None = None,
    ) -> None:
        self.router = router
        self.codec = codec
        self.config = config
        self.metrics = metrics
        self.processes = processes
        self.tracing = tracing
        self.admin_token = admin_token  # what changes of the fleet need, where there are no keys
        self.discovery = discovery
        self.live = Live(router, clock)
        self.models = Models(router, config, clock)
        self._clock = clock
        router.on_decision = partial(metrics.phase, "decide")
        self.leaving = False  # requests are still taken, and `ready` says that there will be none soon
        self.draining = False
        self.live_choices = 0
        self.bodies = ByteBudget(config.max_bodies_bytes)
        self._unread = UnreadBudget(UNREAD_BYTES_MAX)
        self.on_close: list[Callable[[], object]] = []  # what is to be ended with it

    def configure(self, config: GatewayConfig) -> None:
        """Go on with another configuration."""
        self.config = config
        self.models.configure(config)

    def close(self) -> None:
        """End what belongs to it; the router is ended by who made that."""
        for end in self.on_close:
            end()

    # --- the model ----------------------------------------------------------------------------------------------------

    @property
    def model_names(self) -> list[str]:
        """The names that requests may use: those of the configuration, else what the workers call it."""
        return self.models.names

    @property
    def max_model_tokens(self) -> int:
        """The longest prompt and output together that every known worker takes."""
        limits = [w.welcome.max_model_tokens for w in self.router.fleet.workers.values() if w.welcome is not None]
        return min(limits, default=2**31 - 1)

    @property
    def ready(self) -> bool:
        """Whether a request would find a worker now."""
        return not (self.leaving or self.draining) and any(
            w.state == "ready" for w in self.router.fleet.workers.values()
        )

    def check_model(self, name: str | None) -> str:
        """The model's name for the answer. Raises `ApiError` 404 for another model."""
        return self.models.get(name).name

    # --- prompts ------------------------------------------------------------------------------------------------------

    def text_codec(self, param: str) -> TextCodec:
        """The tokenizer, for a field that holds text. Raises `ApiError` where the gateway has none."""
        if self.codec is None:
            raise wrong(f"{param}: this gateway has no tokenizer, send token ids", param, "no_tokenizer")
        return self.codec

    async def tokens_of(self, prompt: str | TokenIds, param: str) -> TokenIds:
        """Token ids of one prompt. Raises `ApiError` or `QueueFull`."""
        if isinstance(prompt, str):
            codec = self.text_codec(param)
            return await self._timed(codec.encode(prompt, tokens_max=self.max_model_tokens), param)
        return prompt

    async def tokens_of_all(self, prompts: Sequence[str | TokenIds], param: str) -> list[TokenIds]:
        """Token ids of several prompts. Raises `ApiError` or `QueueFull`."""
        return [await self.tokens_of(prompt, param) for prompt in prompts]

    async def tokens_of_chat(self, messages: Sequence[Mapping[str, Any]]) -> TokenIds:
        """Token ids of a conversation. Raises `ApiError` or `QueueFull`."""
        codec = self.text_codec("messages")
        return await self._timed(codec.encode_chat(messages, tokens_max=self.max_model_tokens), "messages")

    async def tokens_of_made(self, size: int, make: Callable[[], Sequence[Piece]]) -> TokenIds:
        """Token ids of a prompt that `make` makes in a thread, out of about so many bytes. Raises `ApiError`,
        `QueueFull`, or what `make` does."""
        codec = self.text_codec("messages")
        return await self._timed(codec.encode_made(size, make, tokens_max=self.max_model_tokens), "messages")

    @property
    def engine(self) -> str:
        """The engine of all workers; "" where they differ or none is known."""
        names = {w.welcome.engine for w in self.router.fleet.workers.values() if w.welcome is not None}
        return names.pop() if len(names) == 1 else ""

    async def _timed(self, tokenizing: Awaitable[TokenIds], param: str) -> TokenIds:
        began = self._clock()
        try:
            return await tokenizing
        except PromptTooLong as error:
            raise wrong(str(error), param, "context_length_exceeded") from error
        finally:
            self.metrics.phase("tokenize", self._clock() - began)

    def output_limit(self, prompt_tokens: int, asked: int | None, param: str, default: int | None = None) -> int:
        """Output tokens a request may have: what it asks for, else what the model has room for, within `default` (the
        API's) and `default_max_tokens` where there are such.

        Raises `ApiError` where the prompt and what is asked for do not fit the model.
        """
        room = self.max_model_tokens - prompt_tokens
        if room <= 0 or (asked is not None and asked > room):
            raise wrong(
                f"the model takes {self.max_model_tokens} tokens, the prompt has {prompt_tokens}"
                + ("" if asked is None else f" and {asked} are asked for"),
                param,
                "context_length_exceeded",
            )
        return min(room, self.config.default_max_tokens or room, default or room) if asked is None else asked

    def missing_field(self, sampling: SamplingParams) -> str | None:
        """The first field that a request asks for and no worker's engine has; None where one worker has them all, or
        none is connected."""
        needs = sampling.needs()
        missing = self.router.fleet.missing(needs, resumed=False) if needs else None
        return missing.partition(",")[0] if missing else None

    def check_choices(self, count: int) -> None:
        """Raise `ApiError` where a request asks for more choices (prompts times n) than one may have."""
        if count > self.config.choices_max:
            raise wrong(f"{count} choices are asked for, the limit is {self.config.choices_max}", "n")

    # --- generating ---------------------------------------------------------------------------------------------------

    def plan(
        self,
        context: RequestContext,
        prompts: Sequence[TokenIds],
        sampling: SamplingParams,
        *,
        choices: int = 1,
        stops: tuple[str, ...] = (),
        salt: str | None = None,
        skip_special_tokens: bool = True,
        keep_stop: bool = False,
    ) -> list[ChoiceJob]:
        """The jobs of a request. Raises `ApiError` where they are more than one request may have."""
        self.check_choices(len(prompts) * choices)
        if stops and self.codec is None:
            raise wrong("stop: this gateway has no tokenizer, send stop_token_ids", "stop", "no_tokenizer")
        context.charge(len(prompts) * choices - 1)
        namespace: Hashable = None if salt is None else ("salt", salt)
        request_id = f"{context.request_id}#{secrets.token_hex(6)}"
        template = ChoiceJob(
            0,
            request_id,
            prompts[0],
            sampling,
            stops,
            namespace,
            skip_special_tokens,
            client=context.key_name,
            first_token_seconds=self.left_seconds(context),
            claim=self.claim_of(context),
            session=context.session,
            keep_stop=keep_stop,
            group=context.group,
        )
        return jobs_for(prompts, template, choices)

    def claim_of(self, context: RequestContext) -> dict[str, Any]:
        """What the request names of tenant, deadline and class, as `Router.generate` takes it; the deadline is what is
        left of it."""
        deadline = context.deadline_seconds
        if deadline is None and context.tenant is None and context.priority is None:
            return {}
        if deadline is not None:
            deadline = max(deadline - (self._clock() - context.started), 1e-3)
        named = {"tenant": context.tenant, "deadline_seconds": deadline, "priority": context.priority}
        return {name: value for name, value in named.items() if value is not None}

    def left_seconds(self, context: RequestContext) -> float | None:
        """What is left of the client's time; of a time that is over, as little as can be said."""
        if context.timeout_seconds is None:
            return None
        return max(context.timeout_seconds - (self._clock() - context.started), 1e-3)

    async def run(self, jobs: Sequence[ChoiceJob], context: RequestContext) -> AsyncGenerator[TextPiece, None]:
        """The pieces of all jobs. Raises `ApiError` when draining or at the bound of live choices."""
        if self.draining:
            raise unavailable("this gateway is shutting down", "draining")
        if self.live_choices + len(jobs) > self.config.max_live_requests:
            raise unavailable(f"{self.live_choices} requests are live, the bound of this gateway", "queue_full")
        places = _Places(self, jobs, context)
        unread = UnreadPieces(self._unread, len(jobs))
        try:
            async with aclosing(pieces(self.router, self.codec, jobs, context.progress, unread, places)) as stream:
                async for piece in stream:
                    yield piece
        finally:
            places.close()

    def stats(self) -> dict[str, Any]:
        """What the gateway itself holds now. Changes nothing. On the loop only."""
        tasks = len(asyncio.all_tasks())
        found = {"discovery": [] if self.discovery is None else self.discovery.stats()}
        known = {"live_choices": self.live_choices, "draining": self.draining, "ready": self.ready, "tasks": tasks}
        return known | found

    def model_of(self) -> dict[str, str]:
        """The model of each worker, by its address. Changes nothing. On the loop only."""
        workers = self.router.fleet.workers.items()
        return {address: one.welcome.model for address, one in workers if one.welcome is not None}


class _Places:
    """The places of one request's choices, each held until its generation has ended; and what is counted of it."""

    def __init__(self, gateway: Gateway, jobs: Sequence[ChoiceJob], context: RequestContext) -> None:
        self._gateway = gateway
        self._context = context
        self._held = len(jobs)
        gateway.live_choices += self._held
        self._watch = gateway.metrics.watch(gateway.router.scheduler, jobs, context)

    def came(self, piece: TextPiece) -> None:
        """A piece has come, read or not."""
        watch, context = self._watch, self._context
        if watch.saw(piece):
            self._gateway.live.placed(piece.choice)
        if context.first_token_seconds is None and watch.first_token_seconds is not None:
            context.first_token_seconds = watch.first_token_seconds
            self._gateway.live.first_token(watch.first_token_seconds)

    def ended(self) -> None:
        """A generation has ended."""
        self._held -= 1
        self._gateway.live_choices -= 1

    def close(self) -> None:
        """Give back the places of what never began."""
        self._gateway.live_choices -= self._held
        self._held = 0


def decision_headers(progress: RequestProgress) -> dict[str, str]:
    """Where the first choice went and why, for the answer's headers."""
    first = progress.choices[0] if progress.choices else None
    if first is None or first.decision is None:
        return {}
    decision = first.decision
    text = f"reason={decision.reason}, matched_tokens={decision.matched_tokens}"
    text += f", prompt_tokens={decision.prompt_tokens}"
    return {"x-preble-worker": _header_safe(first.worker or decision.worker), "x-preble-decision": _header_safe(text)}


def _header_safe(text: str) -> str:
    if len(text) <= 256 and text.isascii() and text.isprintable():
        return text
    return "".join(c if " " <= c <= "~" else "?" for c in text)[:256]
