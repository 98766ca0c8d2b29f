"""What the gateway, prefill, decode and draft measure: names, labels and buckets in one place.

Each class registers its metrics once and has a method per event, so a service's file says what
happened and this one says how it is counted. The tokenizer's and the router's metrics stand beside
their code. No label carries a request id or a user. Times in seconds, as Prometheus asks; the
methods take what the messages carry (ns or ms where the name says so).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from decant.engine.host_tier import TierStats

# TTFT: the widest set in use elsewhere (1 ms to 43 min), so that dashboards made for it work here.
TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0),
)
E2E_S = (
    *(0.1, 0.2, 0.3, 0.4, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 2400.0, 7680.0),
)
STAGE_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 60.0)
STEP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
DELIVERY_S = (
    *(0.0002, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.01, 0.02, 0.05, 0.1, 0.5, 5.0),
)
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5)) + (1e6,)
BATCH = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
STAGES = ("queue", "reserve", "prefill", "handoff", "decode")
PAGE_STATES = ("free", "reserved", "active", "published", "cached", "quarantined")


class GatewayMetrics:
    """What clients see."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"decant_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"decant_{name}", text, buckets=buckets, registry=registry)

        self.http_requests = counter(
            "http_requests", "HTTP requests by route and status", ("route", "status")
        )
        self.http_active = Gauge(
            "decant_http_requests_active", "HTTP requests under way", registry=registry
        )
        self.success = counter(
            "request_success", "Choices that ended, by finish reason", ("finished_reason",)
        )
        self.failures = counter("request_errors", "Requests that failed, by code", ("code",))
        self.cancels = counter("requests_cancelled", "Requests whose client went away")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens whose prefill was skipped")
        self.generation_tokens = counter("generation_tokens", "Output tokens")
        self.ttft = histogram(
            "time_to_first_token_seconds", "Request received to first token sent", TTFT_S
        )
        self.itl = histogram(
            "inter_token_latency_seconds", "Gap between two arrivals of tokens", ITL_S
        )
        self.tpot = histogram(
            "request_time_per_output_token_seconds", "(last - first) / (tokens - 1)", ITL_S
        )
        self.e2e = histogram("e2e_request_latency_seconds", "Received to last token", E2E_S)
        self.delivery = histogram(
            "token_delivery_seconds",
            "End of a decode step to its tokens' write to the client's socket, by token batch",
            DELIVERY_S,
        )
        self.stage = Histogram(
            "decant_stage_seconds",
            "Time of a request's stages: " + " ".join(STAGES),
            ["stage"],
            buckets=STAGE_S,
            registry=registry,
        )
        for stage in STAGES:
            self.stage.labels(stage)
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens", TOKENS)
        self.output_length = histogram("request_generation_tokens", "Output tokens", TOKENS)
        self.params_n = histogram("request_params_n", "n of requests", (1, 2, 5, 10, 20))
        self.params_max_tokens = histogram(
            "request_params_max_tokens", "max_tokens of requests", TOKENS
        )
        self.parked = Gauge(
            "decant_slow_reader_parked", "Requests parked for a slow reader", registry=registry
        )
        self.acceptance = histogram(
            "request_acceptance_length", "Tokens per verify step of a request", (
                1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.5, 4.0, 5.0,
            ),
        )  # fmt: skip

    def request(self, num_prompt: int, num_choices: int, max_tokens: int) -> None:
        """A request passed validation and has its prompt's ids."""
        self.prompt_tokens.inc(num_prompt)
        self.prompt_length.observe(num_prompt)
        self.params_n.observe(num_choices)
        self.params_max_tokens.observe(max_tokens)

    def tokens(self, num: int, gap_s: float, is_first: bool) -> None:
        """``num`` tokens of a choice were sent, ``gap_s`` after the request or the ones before."""
        self.generation_tokens.inc(num)
        (self.ttft if is_first else self.itl).observe(gap_s)

    def choice(self, reason: str, num_tokens: int, first_s: float, last_s: float) -> None:
        """A choice ended: times are since the request came."""
        self.success.labels(reason).inc()
        self.output_length.observe(num_tokens)
        self.e2e.observe(last_s)
        if num_tokens > 1:
            self.tpot.observe((last_s - first_s) / (num_tokens - 1))

    def closed(
        self, num_cached: int, num_accepted: int, num_steps: int, stages_ms: Mapping[str, float]
    ) -> None:
        """The router's accounts of a request."""
        self.cached_tokens.inc(num_cached)
        for stage, took_ms in stages_ms.items():
            if stage in STAGES:
                self.stage.labels(stage).observe(took_ms / 1e3)
        if num_steps:
            self.acceptance.observe(1 + num_accepted / num_steps)


class PageGauge(Collector):
    """KV pages by state, read from the ledger when the page is asked for: they must sum."""

    def __init__(
        self,
        registry: CollectorRegistry,
        pages: Callable[[], Mapping[str, int]],
        num_pages: Callable[[], int],
    ) -> None:
        self._pages, self._num_pages = pages, num_pages
        registry.register(self)

    def collect(self) -> list[GaugeMetricFamily]:
        family = GaugeMetricFamily("decant_pages", "KV pages by state", labels=["state"])
        found = self._pages()
        for state in (*PAGE_STATES, *(s for s in found if s not in PAGE_STATES)):
            family.add_metric([state], found.get(state, 0))
        total = self._num_pages()
        size = GaugeMetricFamily("decant_pool_pages", "KV pages of the pool", total)
        wrong = GaugeMetricFamily(
            "decant_ledger_mismatch",
            "Pages of the pool - sum over states; other than 0: a bug",
            total - sum(found.values()),
        )
        used = GaugeMetricFamily(
            "decant_kv_cache_usage_perc",
            "Share of the pool that is neither free nor only cached, 0 to 1",
            (total - found.get("free", 0) - found.get("cached", 0)) / total if total else 0.0,
        )
        return [family, size, wrong, used]


class PrefillMetrics:
    """Chunks, prefix cache, publications."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tokens = Counter("decant_prefill_tokens", "Prompt tokens computed", registry=registry)
        self.chunk = Histogram(
            "decant_prefill_chunk_seconds", "Time of a chunk", buckets=STEP_S, registry=registry
        )
        self.chunk_tokens = Histogram(
            "decant_prefill_chunk_tokens", "Tokens of a chunk", buckets=TOKENS, registry=registry
        )
        self.queries = Counter(
            "decant_prefix_cache_queries", "Prompt tokens looked up", registry=registry
        )
        self.hits = Counter(
            "decant_prefix_cache_hits", "Prompt tokens found there", registry=registry
        )
        self.useless = Gauge(
            "decant_prefix_cache_useless",
            "1: prompts repeat prefixes and none was found in the last lookups",
            registry=registry,
        )
        self.corrupt = Counter(
            "decant_prefix_cache_corrupt",
            "Cached prefixes whose checksum had changed",
            registry=registry,
        )
        self.waiting = Gauge("decant_prefill_waiting", "Lanes waiting", registry=registry)
        self.running = Gauge("decant_prefill_running", "Lanes under way", registry=registry)
        self.published = Gauge(
            "decant_prefill_unreleased", "Lanes published, not released yet", registry=registry
        )
        self.lost = Counter("decant_prefill_lost", "Lanes given up", ["reason"], registry=registry)

    def lookup(self, num_tokens: int, num_hit: int) -> None:
        """A lane's prompt was looked up in the prefix cache."""
        self.queries.inc(num_tokens)
        self.hits.inc(num_hit)

    def step(self, num_tokens: int, elapsed_ns: int) -> None:
        """One chunk ran."""
        self.tokens.inc(num_tokens)
        self.chunk.observe(elapsed_ns / 1e9)
        self.chunk_tokens.observe(num_tokens)


class TierMetrics(Collector):
    """What the prefix cache evicted and keeps outside the pool."""

    def __init__(
        self, registry: CollectorRegistry, stats: TierStats, restored_tokens: Callable[[], int]
    ) -> None:
        self._stats, self._restored_tokens = stats, restored_tokens
        registry.register(self)

    def collect(self) -> list[Metric]:
        s = self._stats
        size = GaugeMetricFamily(
            "decant_tier_bytes", "Evicted pages and slots kept, by level", labels=["level"]
        )
        size.add_metric(["memory"], s.memory_bytes)
        size.add_metric(["file"], s.file_bytes)
        records = CounterMetricFamily(
            "decant_tier_records", "Pages and slots, by what happened to them", labels=["event"]
        )
        for event, num in (
            ("saved", s.num_saved),
            ("restored", s.num_restored),
            ("dropped", s.num_dropped),
            ("failed", s.num_failed),
        ):
            records.add_metric([event], num)
        tokens = CounterMetricFamily(
            "decant_tier_restored_tokens",
            "Prompt tokens that came back from the tier",
            self._restored_tokens(),
        )
        return [size, records, tokens]


class DecodeMetrics:
    """Steps, speculation, hand-offs."""

    def __init__(self, registry: CollectorRegistry, max_drafts: int) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"decant_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"decant_{name}", text, registry=registry)

        self.steps = Histogram(
            "decant_step_seconds", "Time of a decode step", buckets=STEP_S, registry=registry
        )
        self.batch = Histogram(
            "decant_step_sequences", "Sequences in a step", buckets=BATCH, registry=registry
        )
        self.step_tokens = counter("decode_tokens", "Tokens drawn")
        self.running = gauge("num_requests_running", "Sequences in the batch")
        self.waiting = gauge("decode_waiting", "Lanes reserved, hand-off not complete")
        self.parked = gauge("decode_parked", "Sequences parked for a slow reader")
        self.drafts = counter("spec_decode_num_drafts", "Sequences verified with drafts")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens verified")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self.accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position after the last drawn token (from 0)",
            ("position",),
        )
        self.drafted_at = counter(
            "spec_decode_num_draft_tokens_per_pos",
            "Draft tokens verified, by position",
            ("position",),
        )
        for position in range(max_drafts):
            self.accepted_at.labels(str(position))
            self.drafted_at.labels(str(position))
        self.draft_wait = Histogram(
            "decant_draft_wait_seconds",
            "Time that a step waited for drafts",
            buckets=STEP_S,
            registry=registry,
        )
        self.draft_timeouts = counter("draft_timeouts", "Steps that went on without drafts")
        self.planned_drafts = gauge("draft_tokens_planned", "k of the last step")
        self.cache = (
            counter("page_cache_hits", "Full pages of hand-offs that were here"),
            counter("page_cache_misses", "Full pages of hand-offs that had to travel"),
            counter("page_cache_corrupt", "Cached pages whose checksum had changed"),
        )
        self.handoff_bytes = counter("handoff_bytes", "KV bytes pulled", ("transport",))
        self.handoff = Histogram(
            "decant_handoff_seconds",
            "Time from the first pull of a lane to its verification",
            buckets=STAGE_S,
            registry=registry,
        )
        self.handoff_failures = counter(
            "handoff_failures", "Hand-offs that failed, by reason", ("reason",)
        )
        self.preempted = counter("decode_preemptions", "Sequences put out of the full pool")
        self.expired = counter("lease_expired", "Requests whose deadline passed at decode")
        self.replays = counter("decode_replays", "Replays that a tokenizer asked for")

    def step(self, num_sequences: int, num_tokens: int, elapsed_ns: int) -> None:
        """One step ran and drew ``num_tokens``."""
        self.steps.observe(elapsed_ns / 1e9)
        self.batch.observe(num_sequences)
        self.step_tokens.inc(num_tokens)

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """A sequence's drafts were verified: the first ``num_accepted`` were right."""
        if not num_drafted:
            return
        self.drafts.inc()
        self.draft_tokens.inc(num_drafted)
        self.accepted.inc(num_accepted)
        for position in range(num_drafted):
            self.drafted_at.labels(str(position)).inc()
            if position < num_accepted:
                self.accepted_at.labels(str(position)).inc()

    def handed_off(self, transport: str, num_bytes: int, took_ms: float) -> None:
        """A lane's KV is here and verified."""
        self.handoff_bytes.labels(transport).inc(num_bytes)
        self.handoff.observe(took_ms / 1e3)


class DraftMetrics:
    """Proposals of the MTP layer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.proposals = Histogram(
            "decant_draft_step_seconds", "Time of a proposal", buckets=STEP_S, registry=registry
        )
        self.sequences = Histogram(
            "decant_draft_sequences", "Sequences in a proposal", buckets=BATCH, registry=registry
        )
        self.tokens = Counter("decant_draft_tokens", "Tokens proposed", registry=registry)

    def propose(self, num_sequences: int, num_tokens: int, elapsed_ns: int) -> None:
        """One proposal ran."""
        self.proposals.observe(elapsed_ns / 1e9)
        self.sequences.observe(num_sequences)
        self.tokens.inc(num_tokens)
