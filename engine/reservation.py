"""How much of the pool a lane takes at decode: whether it fits, its pages and slots, its choices.

Pages are reserved for the whole sequence and a little growth. The choices of a lane share its full
pages (a reference each in the ledger); the open page and the slot are copied for each choice when
the lane is admitted.
"""

from __future__ import annotations

import math
from array import array

from decant.engine.decode_batch import Limits
from decant.engine.handoff import Intake
from decant.engine.kv_pages import Books, pages_for
from decant.engine.sampler import History
from decant.engine.sequence import Lane, Request, Sequence
from decant.protocol.messages import Reserve


def max_length(limits: Limits, message: Reserve) -> int:
    """Tokens that a sequence of this request can have at most, prompt included."""
    return min(limits.max_context, message.num_prompt_tokens + message.sampling.max_tokens)


def pages_at_start(limits: Limits, message: Reserve, num_ids: int) -> int:
    """Pages of one sequence at admission: what it has, and growth as far as it can grow."""
    length = max(num_ids, min(num_ids + limits.growth_tokens, max_length(limits, message)))
    return pages_for(length, limits.page_tokens)


def malformed(limits: Limits, message: Reserve, ids: array[int]) -> str:
    """What is wrong with a reservation that no correct gateway and router send, or ""."""
    s, choices = message.sampling, message.choices
    numbers = (s.temperature, s.top_p, s.min_p, s.presence_penalty, s.frequency_penalty)
    if not choices or len(set(choices)) != len(choices) or min(choices) < 0:
        return f"choices {choices}"
    if message.lane != min(choices) or not 0 < message.num_prompt_tokens <= len(ids):
        return f"lane {message.lane}, {message.num_prompt_tokens} prompt tokens of {len(ids)}"
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        return f"a token id is outside the vocabulary of {limits.vocab_size}"
    if not all(math.isfinite(x) for x in (*numbers, *s.logit_bias.values())):
        return "a sampling parameter is not finite"
    if s.temperature < 0 or not (0 < s.repetition_penalty < math.inf) or s.max_tokens < 0:
        return "a sampling parameter is out of range"
    if any(not 0 <= t < limits.vocab_size for t in (*s.logit_bias, *s.stop_token_ids)):
        return "logit_bias or stop_token_ids name a token outside the vocabulary"
    return ""


def pages_wanted(limits: Limits, message: Reserve, num_ids: int, num_kept: int = 0) -> int:
    """Pages that a lane and its choices take now. num_kept: of these, shared with the cache."""
    shared = num_ids // limits.page_tokens
    own = pages_at_start(limits, message, num_ids) - shared
    return shared - num_kept + len(message.choices) * own


def refusal(
    limits: Limits,
    books: Books,
    num_running: int,
    message: Reserve,
    ids: array[int],
    num_kept: int = 0,
) -> tuple[str, str]:
    """Why a lane cannot be reserved (reason and sentence of Refused), or two empty strings.

    num_kept: pages that it shares with the cache and holds already.
    """
    num = len(message.choices)
    if len(ids) > limits.max_context:
        return "too_large", f"{len(ids)} tokens do not fit a context of {limits.max_context}"
    shared, longest = len(ids) // limits.page_tokens, max_length(limits, message)
    at_end = pages_for(max(longest, len(ids)), limits.page_tokens)
    most = shared + num * (at_end - shared)
    if most > limits.num_pages or num > limits.num_slots:
        return "too_large", (
            f"{num} choices of up to {longest} tokens need {most} pages and {num} slots of "
            f"{limits.num_pages} and {limits.num_slots}"
        )
    now = pages_wanted(limits, message, len(ids), num_kept)
    # What runs must be able to grow a little, or admissions and preemptions would alternate.
    spare = min(num_running, limits.num_pages // 16)
    num_free = books.pages.num_free + books.pages.counts()["cached"]
    if now + spare > num_free or num > books.slots.num_free:
        return "busy", f"{now} pages and {num} slots are not free now"
    return "", ""


def make_lane(
    limits: Limits,
    books: Books,
    request: Request,
    message: Reserve,
    ids: array[int],
    peer: str,
    kept: list[tuple[int, int]],
) -> Lane:
    """Reserve for a lane that ``refusal`` let pass; as many pages are free.

    peer: incarnation of its prefill, if known. kept: its first pages, held by the first choice
    already, with their checksums.
    """
    first, *others = message.choices
    num_shared = len(ids) // limits.page_tokens
    num_pages = pages_at_start(limits, message, len(ids))
    lane = Lane(request, message, ids, [], {first: []}, {}, None)
    lane.pages = [page for page, _ in kept]
    lane.pages += books.pages.reserve(lane.owner(first), num_pages - len(kept))
    for choice in others:
        lane.tails[choice] = books.pages.reserve(lane.owner(choice), num_pages - num_shared)
    for choice in message.choices:
        lane.slots[choice] = books.slots.reserve(lane.owner(choice), 1)[0]
    if message.prefill:
        lane.intake = Intake(
            lane.key,
            peer,
            lane.pages,
            lane.slots[first],
            len(ids),
            limits.page_tokens,
            [checksum for _, checksum in kept],
        )
    return lane


def fork(
    limits: Limits,
    books: Books,
    lane: Lane,
    page_copies: list[tuple[int, int]],
    slot_copies: list[tuple[int, int, int]],
) -> list[Sequence]:
    """One sequence per choice of a complete lane; the copies that this needs are appended."""
    message, ids = lane.message, lane.ids
    first = message.choices[0]
    num_shared, open_tokens = divmod(len(ids), limits.page_tokens)
    prompt, output = ids[: message.num_prompt_tokens], ids[message.num_prompt_tokens :]
    sequences: list[Sequence] = []
    books.pages.activate(lane.owner(first), lane.pages)
    for choice in message.choices:
        owner, pages = lane.owner(choice), lane.pages
        books.slots.activate(owner, [lane.slots[choice]])
        if choice != first:
            books.pages.share(owner, lane.pages[:num_shared])
            books.pages.activate(owner, lane.tails[choice])
            pages = lane.pages[:num_shared] + lane.tails[choice]
            if open_tokens:
                page_copies.append((lane.pages[num_shared], pages[num_shared]))
            slot_copies.append((lane.slots[first], lane.slots[choice], len(ids)))
        sequence = Sequence(
            lane.request,
            choice,
            message.sampling,
            message.grammar,
            len(prompt),
            max_length(limits, message),
            lane.slots[choice],
            list(pages),
            array("i", ids),
            first_output=len(output),
            mtp_end=len(ids) - 1,
        )
        if History.is_needed(message.sampling):
            sequence.history = History(limits.vocab_size, prompt, output)
        sequences.append(sequence)
    return sequences
