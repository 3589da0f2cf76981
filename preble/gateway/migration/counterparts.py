"""What each option of sglang-router 0.3.2, smg 1.13 and the vLLM project's router is here: a key of the configuration,
or why there is none. Owns the table, which docs/migrating.md is made of, and reads no command line.

An option is written as its command line takes it: `--host` one value, `--dp-aware!` none, `--worker-urls*` any number.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

SGLANG, SMG, VLLM = "sglang-router", "smg", "vllm-router"
ALL = (SGLANG, SMG, VLLM)
OLD = (SGLANG, VLLM)
VERSIONS = {SGLANG: "0.3.2", SMG: "1.13", VLLM: "as of November 2026"}

RANKS = "data-parallel ranks are found, and are workers of their own"
ROLES = "each with its `role`; a request of several prompts or choices needs a server that does both"
NO_ENCODERS = "no encode workers apart"


class Takes(enum.Enum):
    """How many words follow an option."""

    NONE = "!"
    ONE = ""
    MANY = "*"


@dataclass(frozen=True, slots=True)
class Counterpart:
    """Options of a kind. `options`: separated by blanks; `key`: of the configuration, or "" with `why` there is none.
    `refused`: a fleet that needs it cannot be served without, so the command line is not translated."""

    options: str
    key: str
    why: str
    routers: tuple[str, ...] = ALL
    refused: bool = False

    def forms(self) -> dict[str, Takes]:
        """Each option, and what follows it."""
        found = {}
        for text in self.options.split():
            takes = Takes(text[-1]) if text[-1] in "!*" else Takes.ONE
            found[text.rstrip("!*")] = takes
        return found


SUBJECTS: dict[str, tuple[Counterpart, ...]] = {
    "Where it listens": (
        Counterpart("--host --port", "host port", "beyond loopback keys are needed, or `insecure`"),
        Counterpart("--tls-cert-path --tls-key-path", "tls_certificate tls_key", "", (SGLANG, SMG)),
        Counterpart("--cors-allowed-origins*", "allowed_origins", "`*` needs keys"),
        Counterpart("--health-check-port", "", "`/health` and `/ready` are on the gateway's own port", (SMG,)),
        Counterpart("--shutdown-grace-period-secs", "drain_seconds", "default 30, not 180", (SGLANG, SMG)),
        Counterpart(
            "--header-read-timeout-secs --idle-connection-timeout-secs --stream-body-stall-timeout-secs "
            "--sse-keepalive-secs",
            "",
            "fixed bounds on heads and bodies that stall; a silent stream carries nothing to keep it open",
            (SMG,),
        ),
    ),
    "Workers": (
        Counterpart("--worker-urls*", "workers", "or `servers`, where each needs a key or a certificate"),
        Counterpart("--api-key", "servers", "the servers' own key; clients need it, too, so `api_keys` has it"),
        Counterpart("--dp-aware!", "", RANKS, (SGLANG, SMG)),
        Counterpart(
            "--intra-node-data-parallel-size",
            "",
            RANKS,
            (VLLM,),
        ),
        Counterpart("--dp-minimum-tokens-scheduler!", "", "the rule places on ranks as on workers", (SMG,)),
        Counterpart("--enable-igw!", "", "several models behind one gateway need no option"),
        Counterpart("--backend", "", "SGLang and vLLM differ in what they answer", (SGLANG, SMG)),
        Counterpart(
            "--worker-startup-timeout-secs",
            "connect_seconds",
            "with `min_workers`; later ones may come later",
        ),
        Counterpart("--worker-startup-check-interval", "", "connecting is tried again by itself, 0.1 s apart at first"),
        Counterpart("--worker-startup-delay", "", "connecting is tried again by itself, 0.1 s apart at first", (SMG,)),
        Counterpart(
            "--upstream-http2! --upstream-pool-idle-timeout-secs",
            "",
            "HTTP/1.1 to servers, over connections that are kept and renewed when a server closes them",
            (SMG,),
        ),
        Counterpart("--zmq-engine-count", "", "`preble worker` holds one engine; several are several workers", (SMG,)),
        Counterpart("--ca-cert-paths*", "servers", "`ca_file` of each server; one file", (SGLANG, SMG)),
        Counterpart(
            "--client-cert-path --client-key-path",
            "",
            "servers are shown keys, not certificates; between machines `preble worker` has CURVE keys",
            (SGLANG, SMG),
            refused=True,
        ),
        Counterpart(
            "--job-queue-capacity --job-queue-concurrency",
            "",
            "membership changes at once",
            (SMG,),
        ),
    ),
    "Discovery": (
        Counterpart(
            "--service-discovery! --selector* --service-discovery-port --service-discovery-namespace",
            "discovery",
            "pods by their labels, in the gateway's own namespace where none is named; a Service, DNS or a file, too",
        ),
        Counterpart("--discovery-provider --discovery-file", "discovery", "`kubernetes` and `file`", (SMG,)),
        Counterpart(
            "--discovery-check-interval-secs", "", "Kubernetes reports by itself; `look_seconds` of a file", (SMG,)
        ),
        Counterpart("--prefill-selector* --decode-selector*", "discovery", ROLES),
        Counterpart("--encode-selector*", "", NO_ENCODERS, (SMG,), refused=True),
        Counterpart("--router-selector*", "", "`peers` may name a headless Service of the gateways", (SMG,)),
        Counterpart(
            "--model-id-from --kv-connector-annotation --kv-engine-id-annotation",
            "",
            "servers say their models themselves; `preble/model` and others annotate pods",
            (SMG,),
        ),
        Counterpart("--vllm-discovery-address", "", "servers do not register themselves", (VLLM,), refused=True),
    ),
    "The rule": (
        Counterpart(
            "--policy",
            "policy",
            "a policy that is named is kept; without one E2 places, the reason to come. `manual`, `bucket`, "
            "`passthrough` and `sticky_round_robin` have no counterpart",
        ),
        Counterpart(
            "--cache-threshold --balance-abs-threshold --balance-rel-threshold",
            "policy",
            "arguments of the policy `cache_aware`; E2 weighs seconds, not thresholds",
            OLD,
        ),
        Counterpart(
            "--cache-threshold --cache-match-threshold --balance-abs-threshold --spill-abs-threshold "
            "--balance-rel-threshold --spill-rel-threshold",
            "policy",
            "the policy `cache_aware_spill` has smg's defaults; E2 weighs seconds, not thresholds",
            (SMG,),
        ),
        Counterpart(
            "--balance-token-usage-threshold --overload-token-usage-threshold --prefix-token-count "
            "--prefix-hash-load-factor --prefix-hash-balance-abs-threshold --least-load-kv-pressure-weight "
            "--least-load-default-throughput --least-load-mean-prefill-tokens --least-load-max-waiting-requests "
            "--power-of-two-load-metric --selection-policy --selection-temperature --overlap-decay",
            "",
            "thresholds and weights of rules that E2 replaces with one price in seconds",
            (SMG,),
        ),
        Counterpart("--load-monitor-interval --disable-load-monitoring!", "", "load is what was placed", (SMG,)),
        Counterpart(
            "--worker-overload-waiting-requests --worker-overload-token-usage --worker-overload-protection! "
            "--disable-worker-overload-protection! --worker-overload-shed!",
            "",
            "`refuse_wait_seconds` refuses by the wait that is predicted, in seconds",
            (SMG,),
        ),
        Counterpart(
            "--worker-warmup-secs --worker-warmup-share --worker-warmup-blocks --worker-warmup-thin-ratio "
            "--worker-warmup-divert-every",
            "",
            "a newcomer is empty and idle, which the price knows",
            (SMG,),
        ),
        Counterpart(
            "--routing-key-override! --sticky-sessions! --routing-key-headers* --max-idle-secs --sticky-key-idle-secs",
            "",
            "a session's next turn finds its cache by its prompt; headers of sessions are known",
            (SMG,),
        ),
        Counterpart("--max-idle-secs --assignment-mode", "", "of the policy `manual`", (SGLANG,)),
        Counterpart("--assignment-mode", "", "of sticky sessions", (SMG,)),
        Counterpart("--bucket-adjust-interval-secs", "", "of the policy `bucket`", (SGLANG, SMG)),
        Counterpart(
            "--eviction-interval-secs --max-tree-size", "", "`scheduler.max_bytes` bounds the index, at every insert"
        ),
        Counterpart(
            "--kv-index --block-size --cache-boundaries --cache-index --cache-ttl-secs --selection-accounting-ttl-ms",
            "",
            "one index of tokens; servers say how large their blocks are, bookings end with their requests",
            (SMG,),
        ),
    ),
    "Prefill and decode apart": (
        Counterpart("--prefill* --decode", "servers", ROLES),
        Counterpart("--prefill-policy --decode-policy", "", "one price chooses both servers, or one that does both"),
        Counterpart("--pd-disaggregation!", "", "servers have a `role`", (SGLANG, SMG)),
        Counterpart("--mini-lb!", "", "requests are placed as ever", OLD),
        Counterpart(
            "--prefill-max-inflight-requests-per-worker --prefill-queue-size --prefill-queue-timeout-secs "
            "--pd-admission-wait-secs",
            "",
            "`look_ahead_seconds`; one that would wait longer than `refuse_wait_seconds` is refused at once",
            (SMG,),
        ),
        Counterpart("--epd-disaggregation! --encode* --encode-policy", "", NO_ENCODERS, (SMG,), refused=True),
        Counterpart(
            "--vllm-pd-disaggregation! --kv-connector",
            "",
            "servers have a `role`; they are sent `kv_transfer_params`, as vLLM's NixlConnector takes them",
            (VLLM,),
        ),
    ),
    "Bounds": (
        Counterpart("--max-payload-size", "max_body_bytes", "default 8 MiB, not 512 MiB"),
        Counterpart("--max-buffered-request-bytes", "", "`max_bodies_bytes` bounds all bodies together", (SMG,)),
        Counterpart("--max-concurrent-requests", "max_live_requests", "default 4096"),
        Counterpart(
            "--queue-size --queue-timeout-secs",
            "",
            "`look_ahead_seconds`; one that would wait longer than `refuse_wait_seconds` is refused at once",
        ),
        Counterpart(
            "--rate-limit-tokens-per-second",
            "rate_limit_per_minute",
            "requests of each key, a minute; not of all together",
        ),
        Counterpart("--request-timeout-secs", "request_seconds", "none by default, not 1,800"),
        Counterpart("--max-background-responses", "", "`background` is the servers' own", (SMG,)),
    ),
    "Faults": (
        Counterpart(
            "--retry-max-retries --retry-initial-backoff-ms --retry-max-backoff-ms --retry-backoff-multiplier "
            "--retry-jitter-factor --disable-retries!",
            "",
            "a request goes on elsewhere when its worker fails, in mid-stream too, at most 4 times",
        ),
        Counterpart(
            "--cb-failure-threshold --cb-success-threshold --cb-timeout-duration-secs --cb-window-duration-secs "
            "--disable-circuit-breaker!",
            "",
            "a worker is left when it is suspect or gone, and used again when it answers",
        ),
        Counterpart(
            "--health-failure-threshold --health-success-threshold --health-check-timeout-secs "
            "--health-check-interval-secs --health-check-endpoint",
            "",
            "heartbeats every half second",
        ),
        Counterpart("--disable-health-check!", "", "heartbeats every half second", (SGLANG, SMG)),
        Counterpart(
            "--worker-stall-secs --worker-wedge-secs --worker-stale-secs",
            "",
            "a hung server, or engine, is noticed within 2 s, or by what is usual there; `stalled_after_seconds` is "
            "one stream's silence",
            (SMG,),
        ),
        Counterpart(
            "--remove-unhealthy-workers! --no-remove-unhealthy-workers! --worker-auto-recovery! "
            "--no-worker-auto-recovery!",
            "",
            "a worker that answers again is used again, with its cache reckoned empty",
            (SMG,),
        ),
    ),
    "Text, tools and media": (
        Counterpart("--model-path --tokenizer-path", "tokenizer", "a directory, or a hub's name", (SGLANG,)),
        Counterpart("--model-path --model --tokenizer-path", "tokenizer", "a directory, or a hub's name", (SMG,)),
        Counterpart("--chat-template", "", "`chat_template.jinja` in the tokenizer's directory", (SGLANG, SMG)),
        Counterpart("--disable-tokenizer-autoload!", "", "without `tokenizer` only token ids are taken", (SMG,)),
        Counterpart("--tokenizer-cache-enable-l0! --tokenizer-cache-l0-max-entries", "", "one cache", (SGLANG, SMG)),
        Counterpart("--tokenizer-cache-l0-max-memory", "", "one cache", (SMG,)),
        Counterpart("--tokenizer-cache-enable-l1!", "", "always on", (SGLANG, SMG)),
        Counterpart("--tokenizer-cache-l1-max-memory", "tokenizer_cache_bytes", "default 64 MiB", (SGLANG, SMG)),
        Counterpart(
            "--reasoning-parser --tool-call-parser",
            "",
            "servers parse what they say: their own options of these names; the gateway relays",
            (SGLANG, SMG),
        ),
        Counterpart("--parser", "", "servers parse what they say; the gateway relays", (SMG,)),
        Counterpart("--mcp-config-path", "", "tools are called by clients", (SGLANG, SMG), refused=True),
        Counterpart(
            "--multimodal-tensor-transport --multimodal-shm-min-bytes --multimodal-max-inflight-bytes "
            "--mm-per-request-image-limit --mm-processing --mm-pixel-cache-mb --mm-pixel-rdma! "
            "--mm-allowed-media-domains --mm-allow-private-media-hosts! --rdma-listen-ip --rdma-slot-ttl-s "
            "--log-mm-timing!",
            "",
            "servers fetch and prepare media; the gateway routes by its hash",
            (SMG,),
        ),
        Counterpart("--model-alias", "model_names", "names that requests may use", (SMG,)),
        Counterpart("--enable-wasm! --storage-hook-wasm-path", "", "a policy is Python: `module:Class`", (SMG,)),
    ),
    "Stored conversations": (
        Counterpart("--history-backend", "", "responses are kept by the server that made them", (SGLANG, SMG)),
        Counterpart(
            "--history-memory-max-responses --history-memory-max-items --history-memory-retention-secs --schema-config "
            "--oracle-external-auth! --postgres-op-timeout-secs --redis-op-timeout-secs --storage-context-headers*",
            "",
            "responses are kept by the server that made them",
            (SMG,),
        ),
        Counterpart(
            "--oracle-wallet-path --oracle-tns-alias --oracle-connect-descriptor --oracle-username --oracle-password "
            "--oracle-pool-min --oracle-pool-max --oracle-pool-timeout-secs --postgres-db-url --postgres-pool-max "
            "--redis-url --redis-pool-max --redis-retention-days",
            "",
            "responses are kept by the server that made them",
            (SGLANG, SMG),
        ),
    ),
    "Who may ask": (
        Counterpart(
            "--control-plane-api-keys*", "admin_keys", "those with the role `user` are `api_keys`", (SGLANG, SMG)
        ),
        Counterpart("--control-plane-audit-enabled!", "", "the log has every operator's request", (SGLANG, SMG)),
        Counterpart(
            "--jwt-issuer --jwt-audience --jwt-jwks-uri --jwt-role-mapping*",
            "",
            "no tokens of an identity provider: put a proxy that checks them in front",
            (SGLANG, SMG),
            refused=True,
        ),
        Counterpart("--tenant-api-key", "keys", "each with its name", (SMG,)),
        Counterpart(
            "--trust-tenant-header! --tenant-header-name", "", "a tenant is the key that asks", (SMG,), refused=True
        ),
        Counterpart(
            "--priority-scheduler-enabled! --priority-scheduler-default-max-class --priority-scheduler-config "
            "--priority-scheduler-tenant-metric-top-n",
            "",
            "`weight` of a key, and the headers `x-preble-priority` and `x-preble-deadline-seconds`",
            (SMG,),
        ),
        Counterpart(
            "--tenant-rate-limit-enabled! --tenant-rate-limit-config",
            "",
            "`requests_per_minute`, `tokens_per_minute` and `token_budget` of each of `keys`",
            (SMG,),
        ),
    ),
    "What it reports": (
        Counterpart("--log-level", "log_level", "`warning`, not `warn`"),
        Counterpart("--log-dir", "", "standard error is one JSON object a line"),
        Counterpart("--log-json!", "", "standard error is one JSON object a line", (SMG,)),
        Counterpart("--prometheus-host --prometheus-port", "", "`/metrics` is on the gateway's own port"),
        Counterpart("--prometheus-duration-buckets*", "", "fixed buckets", (SGLANG, SMG)),
        Counterpart("--request-id-headers*", "", "`x-request-id`"),
        Counterpart("--enable-trace!", "traces_endpoint", "with the collector's address", (SGLANG, SMG)),
        Counterpart("--otlp-traces-endpoint", "traces_endpoint", "OTLP over HTTP, not gRPC", (SGLANG, SMG)),
        Counterpart("--jemalloc-prof-dir", "", "py-spy and memray know Python", (SMG,)),
    ),
    "Several gateways": (
        Counterpart(
            "--enable-mesh! --mesh-server-name --mesh-host --mesh-advertise-host --mesh-port --mesh-peer-urls* "
            "--mesh-tls-ca-cert --mesh-tls-cert --mesh-tls-key",
            "",
            "`peers`, `peer_bind` and `peer_keys` do that before servers, with addresses and keys of their own; before "
            "our own workers gateways agree through them",
            (SMG,),
        ),
    ),
    "Training": (
        Counterpart(
            "--enable-rl! --rl-control-timeout-secs --rl-fanout-concurrency",
            "",
            "engines are controlled at their own addresses",
            (SMG,),
        ),
    ),
}


def of_router(router: str) -> dict[str, tuple[Counterpart, Takes]]:
    """Each option of a router."""
    rows = [row for rows in SUBJECTS.values() for row in rows if router in row.routers]
    return {option: (row, takes) for row in rows for option, takes in row.forms().items()}
