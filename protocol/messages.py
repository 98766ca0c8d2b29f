"""Every message between two processes: one small struct each, and the table from tag to class.

A message on the wire is a list of frames: a ``Header`` (msgpack map), a body (msgpack map with its
tag under ``type``) and raw
frames (``blobs``) for arrays: token ids are little-endian int32, streams float32. New fields go
last and have a default.
This module knows nothing of sockets (``wire.py`` makes and reads frames).

Words. *request*: one HTTP request, ``request_id`` for its whole life. *attempt*: grows when the
router starts it anew; messages of
an older attempt are dropped by everybody. *choice*: index below ``n``. *lane*: one prefill of one
token sequence that serves one or
more choices; its number is its smallest choice. A fresh request has lane 0 for all choices; after a
loss each unfinished choice is a
lane of its own, since their tokens differ. (request_id, attempt, lane) names a reservation, its
pages and its hand-off.

Who sends what (see docs/architecture.md):
  gateway   -> tokenizer  Encode OpenStream CloseStream Detokenize      tokenizer -> gateway
  Encoded Failed TextDeltas Text
  gateway   -> router     Generate Cancel Emitted StreamCredit          router -> gateway     Queued
  EndChoice Failed AskEmitted Closed PromptLogprobs
  router    -> decode     Reserve Cancel Peers StreamCredit EndChoice   decode -> router
  Reserved Refused Decoding Preempted Finished Lost Cancelled
  router    -> prefill    Prefill Cancel Peers                          prefill -> router
  Prefilled PromptLogprobs Lost Cancelled
  prefill   -> decode     KVReady KVGone                                decode -> prefill
  KVRelease
  decode    -> tokenizer  Tokens                                        tokenizer -> decode
  ReplayFrom
  decode    -> draft      Propose                                       draft -> decode       Drafts
  everybody -> router     Hello Heartbeat                               router -> everybody
  Welcome Refuse Peers Drain FlushCache
"""

from __future__ import annotations

from msgspec import Struct

WIRE_MAJOR = 1  # differs: refused
WIRE_MINOR = 0  # differs: allowed, fields are only appended


class Header(Struct, frozen=True, omit_defaults=True):
    """First frame of every message."""

    source: str  # "decode-0": service and instance
    incarnation: str  # random per process start, 32 hex digits
    seq: int = 0  # per socket, for logs and loss detection
    major: int = WIRE_MAJOR
    sent_ns: int = 0  # CLOCK_MONOTONIC of this host
    traceparent: str = ""


class Message(Struct, frozen=True, tag_field="type", omit_defaults=True):
    """Base of all bodies."""


# ---- what a request is ---------------------------------------------------------------------------


class Sampling(Struct, frozen=True, omit_defaults=True):
    """How tokens are drawn. Ranges are checked in the gateway; decode relies on
    them.
    """

    seed: int = 0  # int64; the gateway always sets one
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over output tokens
    frequency_penalty: float = 0.0  # over output tokens
    repetition_penalty: float = 1.0  # over prompt and output tokens
    logit_bias: dict[int, float] = {}
    logprobs: int = -1  # -1 off, else number of alternatives beside the drawn token
    prompt_logprobs: int = -1  # completions with echo
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []


class Grammar(Struct, frozen=True, omit_defaults=True):
    """What the answer must look like. ``kind``: json_schema, json_object, regex, ebnf,
    structural_tag.
    """

    kind: str
    text: str
    after_token: int = -1  # starts after this token id (the end of thinking); -1 = at once


class ChoiceState(Struct, frozen=True, omit_defaults=True):
    """What the client already has of one choice. Its ids follow in the blob, choices one after the
    other.
    """

    choice: int
    num_ids: int
    is_finished: bool = False


class Output(Struct, frozen=True, omit_defaults=True):
    """How the tokenizer turns ids into what the gateway streams."""

    thinking: bool = False  # the output starts inside the think part
    tools: list[str] = []  # names of the declared tools; empty: calls are not parsed
    stop: list[str] = []  # matched on the content channel only
    include_stop: bool = False
    skip_special_tokens: bool = True
    plain: bool = False  # completions: no reasoning, no tool calls
    num_choices: int = 1
    logprobs: bool = False
    tool_schemas: str = ""  # JSON list of the declared functions, for typed leniency
    min_tokens: int = 0  # stop strings match in what comes after so many


# ---- membership ----------------------------------------------------------------------------------


class PoolHandle(Struct, frozen=True, omit_defaults=True):
    """Names one KV pool of one rank, so that a peer can map it."""

    kind: str  # "shm" (POSIX shared memory) or "cuda_ipc"
    name: str  # shm name, or hex of the 64-byte IPC handle
    epoch: int  # random per pool; checked in the mapping after every copy
    num_pages: int
    page_bytes: int
    num_slots: int
    slot_bytes: int
    layout_hash: str
    rank: int = 0
    device: int = -1


class Hello(Message, frozen=True, tag="hello", omit_defaults=True):
    """First message of every process to the router, and of a dealer to a worker's router socket."""

    service: str
    instance: str
    pid: int
    build: str
    major: int = WIRE_MAJOR
    minor: int = WIRE_MINOR
    model_hash: str = ""  # empty: does not know a model (gateway)
    kv_layout_hash: str = ""
    endpoint: str = ""  # where this process listens, for Peers
    pools: list[PoolHandle] = []
    limits: dict[str, int] = {}  # num_slots, num_pages, page_tokens, max_context, vocab_size ...


class Welcome(Message, frozen=True, tag="welcome", omit_defaults=True):
    router: str  # the router's incarnation
    heartbeat_s: float = 1.0


class Refuse(Message, frozen=True, tag="refuse", omit_defaults=True):
    """The router will not work with this process; ``reason`` is one sentence and shown in /ready.
    """

    reason: str


class Peer(Struct, frozen=True, omit_defaults=True):
    service: str
    instance: str
    incarnation: str
    endpoint: str
    pools: list[PoolHandle] = []
    is_draining: bool = False


class Peers(Message, frozen=True, tag="peers", omit_defaults=True):
    """All live processes; sent on every change. Who is missing is dead: its incarnation never
    returns.
    """

    peers: list[Peer]
    is_ready: bool = False  # a complete chain exists and admission is open
    why: str = ""  # if not: one sentence
    is_full: bool = False  # a complete chain exists, but the queue is full: 429 at once
    retry_after_s: float = 0.0  # if it is full: when there may be room
    num_free: int = -1  # places in the queue, if few are left; -1: enough


class Heartbeat(Message, frozen=True, tag="heartbeat", omit_defaults=True):
    """Once a second from every process to the router, which answers Welcome (then the process knows
    that the router lives) or Refuse("unknown ..."): say Hello again.
    """

    step: int = 0  # engine steps; must grow while busy
    is_busy: bool = False
    is_ready: bool = True  # model loaded, pools mapped
    loop_lag_ms: float = 0.0
    stats: dict[str, float] = {}  # pages by state, queue depths, credits ...
    why: str = ""  # if not ready: one sentence
    is_draining: bool = False  # it got SIGTERM or Drain: no new work, please


class Drain(Message, frozen=True, tag="drain", omit_defaults=True):
    """Router -> service: take no new work, finish or hand back what is there, then exit 0."""

    timeout_s: float = 30.0


class FlushCache(Message, frozen=True, tag="flush_cache", omit_defaults=True):
    """Router -> prefill and decode: forget the prefix caches. What requests hold stays theirs."""


# ---- gateway <-> tokenizer -----------------------------------------------------------------------


class Encode(Message, frozen=True, tag="encode", omit_defaults=True):
    """Render and encode one prompt, and open its output stream. ``kind`` says how ``prompt`` (JSON)
    is read:

    chat: {"messages": [...], "tools": [...], "response_format": ..., "thinking": bool, "effort":
    str, "task": str, "continue": bool, "answer": bool}
    text: a JSON string, encoded as it is without markers;  document: the same after the token that
    begins a text;  ids: a JSON list of ids (checked only).
    """

    request_id: str
    attempt: int
    kind: str
    prompt: bytes
    output: Output
    count_only: bool = False  # /tokenize and count_tokens: opens no stream


class Encoded(Message, frozen=True, tag="encoded", omit_defaults=True):
    """Blob 0: prompt ids, int32."""

    request_id: str
    attempt: int
    num_tokens: int


class Failed(Message, frozen=True, tag="failed", omit_defaults=True):
    """A request failed at this point. ``code``, ``status`` as in errors.py."""

    request_id: str
    attempt: int
    code: str
    message: str
    status: int = 500
    param: str = ""
    retry_after_s: float = 0.0
    is_retryable: bool = True  # False: x-should-retry: false


class OpenStream(Message, frozen=True, tag="open_stream", omit_defaults=True):
    """Gateway -> tokenizer: (re)open a stream, as if the given ids had just been sent. Blob 0: ids
    of all choices.

    With a new attempt after a loss (tokens of it follow by themselves), or with the same attempt
    after a tokenizer's death or a gap: then the tokenizer asks every decode with ReplayFrom for
    each unfinished choice. In both cases it asks again each second until tokens of the attempt
    arrive: decode and this stream may learn of an attempt in either order.
    """

    request_id: str
    attempt: int
    output: Output
    choices: list[ChoiceState] = []


class CloseStream(Message, frozen=True, tag="close_stream", omit_defaults=True):
    request_id: str


class Detokenize(Message, frozen=True, tag="detokenize", omit_defaults=True):
    """Blob 0: ids."""

    request_id: str


class Text(Message, frozen=True, tag="text", omit_defaults=True):
    request_id: str
    text: str
    pieces: list[str] = []  # one per id


class ToolDelta(Struct, frozen=True, omit_defaults=True):
    """A piece of a tool call. The first piece of an index has ``name``; ``arguments`` are
    appended.
    """

    index: int
    name: str = ""
    arguments: str = ""
    is_complete: bool = False  # the call closed


class TokenLogprob(Struct, frozen=True, omit_defaults=True):
    token_id: int
    logprob: float
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    text: str = ""  # filled by the tokenizer
    raw: bytes = b""  # filled by the tokenizer: exact bytes of the piece
    top_text: list[str] = []
    top_raw: list[bytes] = []
    channel: str = "content"  # "reasoning" or "content"; filled by the tokenizer


class TextDelta(Struct, frozen=True, omit_defaults=True):
    """Tokens [start, start + num_ids) of a choice, and what they added to its text. Applied by the
    gateway as a whole or not at all.
    """

    request_id: str
    attempt: int
    choice: int
    start: int  # output position: 0 = first generated token
    num_ids: int
    content: str = ""
    reasoning: str = ""
    tools: list[ToolDelta] = []
    finish_reason: str = ""  # stop length tool_calls error; set once
    matched_stop: str = ""  # the stop string, or the id as text
    logprobs: list[TokenLogprob] = []
    num_reasoning_ids: int = 0


class TextDeltas(Message, frozen=True, tag="text_deltas", omit_defaults=True):
    """One message per step and gateway. Blob 0: ids of all items, in order."""

    items: list[TextDelta]
    drawn_ns: int = 0  # of Tokens


# ---- gateway <-> router --------------------------------------------------------------------------


class Generate(Message, frozen=True, tag="generate", omit_defaults=True):
    """Gateway -> router: start a request, or start it again after the router was lost.

    Blob 0: prompt ids. Blob 1: ids that the client has, of all ``emitted`` choices (empty for a
    fresh request).
    """

    request_id: str
    attempt: int
    num_prompt_tokens: int
    sampling: Sampling
    tokenizer: str  # instance that holds the stream
    num_choices: int = 1
    deadline_ms: int = 0  # CLOCK_MONOTONIC; 0 = none
    grammar: Grammar | None = None
    emitted: list[ChoiceState] = []
    tenant: str = ""  # API key id: fair shares
    cache_salt: str = ""
    priority: int = 0


class Queued(Message, frozen=True, tag="queued", omit_defaults=True):
    request_id: str
    attempt: int
    position: int = 0


class Cancel(Message, frozen=True, tag="cancel", omit_defaults=True):
    """Idempotent, acknowledged by Cancelled, repeated by the router until then. ``attempt`` and all
    older ones are meant. A worker that does not know the request answers Cancelled too.

    reason: client_gone, finished (all choices done or stopped by text), deadline, superseded,
    admin.
    """

    request_id: str
    attempt: int
    reason: str = "client_gone"


class Cancelled(Message, frozen=True, tag="cancelled", omit_defaults=True):
    """Nothing of this attempt or an older one is held any more (quarantined pages excepted, which
    the ledger shows).
    """

    request_id: str
    attempt: int
    num_pages_freed: int = 0


class AskEmitted(Message, frozen=True, tag="ask_emitted", omit_defaults=True):
    """Router -> gateway: what does the client have? From now on only ``attempt`` counts."""

    request_id: str
    attempt: int
    tokenizer: str = ""  # instance to (re)open the stream at, if it must change


class Emitted(Message, frozen=True, tag="emitted", omit_defaults=True):
    """Answer to AskEmitted, after the stream was reopened at the tokenizer. Blob 0: ids of all
    choices.

    Unasked, with the current attempt: the stream moved to ``tokenizer`` (the old one died); the
    router names it in what it sends from now on.
    """

    request_id: str
    attempt: int
    choices: list[ChoiceState]
    tokenizer: str = ""


class Closed(Message, frozen=True, tag="closed", omit_defaults=True):
    """Router -> gateway: the request's last message, with the accounts for usage, logs and
    metrics.
    """

    request_id: str
    attempt: int
    num_cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    num_resumes: int = 0
    stages_ms: dict[str, float] = {}  # queue reserve prefill handoff decode


class StreamCredit(Message, frozen=True, tag="stream_credit", omit_defaults=True):
    """Gateway -> router -> decode: the client reads (True) or is stuck (False: park the request).
    """

    request_id: str
    attempt: int
    is_open: bool


class EndChoice(Message, frozen=True, tag="end_choice", omit_defaults=True):
    """Gateway -> router -> decode: this choice is complete for the client (a stop string), others
    go on. Decode frees it and says Finished. Idempotent; if it is lost, tokens are computed for
    nobody until all choices end.
    """

    request_id: str
    attempt: int
    choice: int


# ---- router <-> workers --------------------------------------------------------------------------


class Reserve(Message, frozen=True, tag="reserve", omit_defaults=True):
    """Router -> decode: a slot and pages for one lane. Blob 0: prompt ids + the lane's emitted ids
    (the sequence to prefill).
    """

    request_id: str
    attempt: int
    lane: int
    choices: list[int]
    num_prompt_tokens: int  # of the original prompt; the rest of blob 0 are ids that the client has
    sampling: Sampling
    tokenizer: str  # instance that gets the Tokens; empty: nobody reads them (the router's canary)
    prefill: (
        str  # instance that will prefill; empty: decode prefills by itself (Prefill.where = local)
    )
    deadline_ms: int = 0
    grammar: Grammar | None = None
    priority: int = 0
    traceparent: str = ""
    cache_salt: str = ""  # who shares cached pages: the same salt as in Prefill


class Reserved(Message, frozen=True, tag="reserved", omit_defaults=True):
    request_id: str
    attempt: int
    lane: int


class Refused(Message, frozen=True, tag="refused", omit_defaults=True):
    """No reservation. busy: try later; too_large: can never fit; draining."""

    request_id: str
    attempt: int
    lane: int
    reason: str
    message: str = ""


class Prefill(Message, frozen=True, tag="prefill", omit_defaults=True):
    """Router -> prefill: fill pages for a lane and offer them to decode. Blob 0: the sequence's
    ids.
    """

    request_id: str
    attempt: int
    lane: int
    decode: str  # instance that reserved
    decode_incarnation: str
    deadline_ms: int = 0
    cache_salt: str = ""
    priority: int = 0
    traceparent: str = ""
    prompt_logprobs: int = -1  # as in Sampling; the prefix cache is then not read


class Prefilled(Message, frozen=True, tag="prefilled", omit_defaults=True):
    """Prefill -> router: all pages of the lane are published (decode has them once it says
    Decoding).
    """

    request_id: str
    attempt: int
    lane: int
    num_cached_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0


class PromptLogprobs(Message, frozen=True, tag="prompt_logprobs", omit_defaults=True):
    """Prefill -> router -> gateway, once a chunk: how likely the model held the tokens at
    ``start`` and after (position 0 has no score; those behind the prompt are of no interest).
    The same positions may come again with another attempt.

    Blobs: logprobs [n] float32, ranks [n] int32, ids [n, num_top] int32 and logprobs [n, num_top]
    float32 of the likeliest tokens.
    """

    request_id: str
    attempt: int
    lane: int
    start: int
    num_top: int


class Decoding(Message, frozen=True, tag="decoding", omit_defaults=True):
    """Decode -> router: the hand-off is verified, the lane is in the batch."""

    request_id: str
    attempt: int
    lane: int
    num_handoff_bytes: int = 0
    handoff_ms: float = 0.0


class Preempted(Message, frozen=True, tag="preempted", omit_defaults=True):
    """Decode -> router: the pool ran dry, this request's pages are free; resume it later."""

    request_id: str
    attempt: int


class Finished(Message, frozen=True, tag="finished", omit_defaults=True):
    """Decode -> router: one choice ended at decode (eos, stop id, length). Its pages are free; its
    ids stay until Cancel.
    """

    request_id: str
    attempt: int
    choice: int
    reason: str
    num_output_tokens: int
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0


class Lost(Message, frozen=True, tag="lost", omit_defaults=True):
    """A worker -> router: this attempt cannot go on here (peer died, checksum, deadline ...); the
    router decides what follows.
    """

    request_id: str
    attempt: int
    lane: int
    reason: str
    code: str = ""  # set: fail the request with this code instead of resuming


# ---- prefill <-> decode --------------------------------------------------------------------------


class KVReady(Message, frozen=True, tag="kv_ready", omit_defaults=True):
    """Prefill -> decode: pages are complete and stay untouched until KVRelease. The receiver owns
    the duty to release.

    pages[i] of prefill's pool holds the lane's page number first_page + i. ``is_last`` adds the
    tail: the partly filled last page is
    among ``pages`` (only its live rows are checksummed) and ``slot`` holds windows, compressor
    state, MTP window and the streams of
    the last position, addressed by position.
    """

    request_id: str
    attempt: int
    lane: int
    epoch: int
    first_page: int
    pages: list[int]
    checksums: list[int]  # crc32 of each page's live rows
    num_tokens: int  # tokens processed so far
    is_last: bool = False
    slot: int = -1
    slot_checksum: int = 0


class KVGone(Message, frozen=True, tag="kv_gone", omit_defaults=True):
    """Prefill -> decode: this lane will not be completed; what was published is withdrawn after
    decode's KVRelease.
    """

    request_id: str
    attempt: int
    lane: int
    reason: str = ""


class KVRelease(Message, frozen=True, tag="kv_release", omit_defaults=True):
    """Decode -> prefill: everything of this lane is copied and verified, or given up (``is_ok``
    False). Decode reads no more of it.
    """

    request_id: str
    attempt: int
    lane: int
    is_ok: bool = True


# ---- decode <-> tokenizer ------------------------------------------------------------------------


class TokenRun(Struct, frozen=True, omit_defaults=True):
    """The tokens that one step added to one choice."""

    request_id: str
    attempt: int
    choice: int
    start: int  # output position of the first id
    num_ids: int
    finish_reason: str = ""  # stop (eos or stop id) or length
    stop_token_id: int = -1  # the id that stopped it; it is the run's last id
    logprobs: list[TokenLogprob] = []


class Tokens(Message, frozen=True, tag="tokens", omit_defaults=True):
    """Decode -> tokenizer: one message per step for all requests. Blob 0: ids of all runs, in
    order.
    """

    step: int
    runs: list[TokenRun]
    drawn_ns: int = 0  # CLOCK_MONOTONIC at the end of the engine's step; 0: a replay


class ReplayFrom(Message, frozen=True, tag="replay_from", omit_defaults=True):
    """Tokenizer -> decode: send the tokens of this choice again from an output position. Whoever
    asks is from now on the tokenizer of the request; a decode that does not hold it ignores it.
    """

    request_id: str
    attempt: int
    choice: int
    start: int


# ---- decode <-> draft ----------------------------------------------------------------------------


class ProposeSlot(Struct, frozen=True, omit_defaults=True):
    """One slot's verified positions start .. start + num_rows - 1 with their next tokens, and how
    to draw drafts after them.

    Rows' trunk streams are in blob 0 ([rows, 4, hidden] float32), the tokens at positions start + 1
    ... in blob 1 (int32).
    """

    slot: int  # of decode's pool: the MTP window lives in its extent
    start: int
    num_rows: int
    num_drafts: int
    mtp_valid_from: int  # window keys before this position are holes
    seed: int = 0
    choice: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


class Propose(Message, frozen=True, tag="propose", omit_defaults=True):
    step: int
    slots: list[ProposeSlot]


class Drafts(Message, frozen=True, tag="drafts", omit_defaults=True):
    """Blob 0: ids, num_drafts per slot in the order of Propose."""

    step: int
    counts: list[int]


TYPES: tuple[type[Message], ...] = (
    Hello, Welcome, Refuse, Peers, Heartbeat, Drain, FlushCache,
    Encode, Encoded, Failed, OpenStream, CloseStream, Detokenize, Text, TextDeltas,
    Generate, Queued, Cancel, Cancelled, AskEmitted, Emitted, Closed, StreamCredit,
    EndChoice,
    Reserve, Reserved, Refused, Prefill, Prefilled, Decoding, Preempted, Finished, Lost,
    KVReady, KVGone, KVRelease, Tokens, ReplayFrom, Propose, Drafts, PromptLogprobs,
)  # fmt: skip

BY_TAG: dict[str, type[Message]] = {str(t.__struct_config__.tag): t for t in TYPES}
