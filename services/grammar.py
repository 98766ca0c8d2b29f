"""Grammar masks for decode: which tokens may follow, for every row of a step.

llguidance does the parsing: it compiles in under a millisecond, has no dependencies, and knows
single control tokens. Masks are computed from the tokens that a sequence has, so they are the same
with and without speculation and after a resume. Nothing here knows HTTP or the engine's insides.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

import llguidance
import llguidance.numpy
import numpy as np
import structlog
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from decant.protocol.config import Config
from decant.protocol.errors import InvalidRequest
from decant.protocol.messages import Grammar
from decant.services import model_folder
from decant.services.chat.markers import EOS
from decant.services.chat.tool_grammar import json_grammar
from decant.services.chat.vocabulary import Vocabulary

Bools = NDArray[np.bool_]
MAX_CACHED = 256
MAX_TEXT_BYTES = 256 << 10
KINDS = ("json_object", "json_schema", "regex", "ebnf", "lark")

log = structlog.get_logger()


class _Words:
    """The vocabulary as llguidance wants it: bytes per id; all added tokens are special."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self.eos_token_id = vocabulary.ids[EOS]
        self.bos_token_id = None
        self.special_token_ids = sorted(i for i in vocabulary.added_ids if i < vocab_size)
        self.tokens = [vocabulary.bytes_of(i) for i in range(vocab_size)]
        self._vocabulary = vocabulary

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", "ignore") if isinstance(text, bytes) else text
        return self._vocabulary.encode_text(text)


class Compiler:
    """Grammar texts to matchers, with a cache. Compiling is bounded by the library's fuel."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        words = _Words(vocabulary, vocab_size)
        self.vocab_size, self.eos_id = vocab_size, words.eos_token_id
        self.special_ids = words.special_token_ids
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(words), n_vocab=vocab_size, eos_token=words.eos_token_id
        )
        self._limits = LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000)
        self._cache: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A fresh matcher. Raises: InvalidRequest if the text is no grammar or too complex."""
        key = grammar.kind, grammar.text
        known = self._cache.get(key)
        if known is None:
            known = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=self._limits)
            if known.is_error():
                raise InvalidRequest(f"the grammar cannot be used: {_reason(known)}")
            self._cache[key] = known
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return known.deep_copy()

    def fill(self, matcher: LLMatcher, bits: NDArray[np.int32]) -> Bools:
        """Mask [vocab_size] of the matcher's state."""
        llguidance.numpy.fill_next_token_bitmask(matcher, bits, 0)
        flat = np.unpackbits(bits[0].view(np.uint8), bitorder="little")
        return flat[: self.vocab_size].view(np.bool_)

    def bits(self) -> NDArray[np.int32]:
        """Room for one mask, 32 tokens a word."""
        room: NDArray[np.int32] = llguidance.numpy.allocate_token_bitmask(1, self.vocab_size)
        return room


def _source(grammar: Grammar) -> str:
    """llguidance's text of a grammar. Raises: InvalidRequest."""
    if len(grammar.text) > MAX_TEXT_BYTES:
        raise InvalidRequest(f"the grammar is larger than {MAX_TEXT_BYTES >> 10} KiB")
    if grammar.kind == "json_object":
        return LLMatcher.grammar_from_lark(json_grammar({"type": "object"}))
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_lark(json_grammar(json.loads(grammar.text)))
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "ebnf" and "::=" in grammar.text:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
        except Exception as error:  # the converter raises what it likes
            raise InvalidRequest(f"the EBNF grammar cannot be read: {error}") from error
    if grammar.kind in ("ebnf", "lark"):
        return LLMatcher.grammar_from_lark(grammar.text)
    raise InvalidRequest(f"unknown kind of grammar {grammar.kind!r}")


def _reason(matcher: LLMatcher) -> str:
    return (matcher.get_error() or "unknown").strip().split("\n")[0][:300]


class Output(Protocol):
    """What is read of a decode sequence. Its output is ``ids[num_prompt:]``."""

    @property
    def grammar(self) -> Grammar | None: ...
    @property
    def ids(self) -> array[int]: ...
    @property
    def num_prompt(self) -> int: ...


class _State:
    """Where one sequence stands in its grammar."""

    def __init__(self, matcher: LLMatcher | None, after_token: int) -> None:
        self.matcher = matcher  # None: broken, only the end is allowed
        self.after_token = after_token
        self.is_open = after_token < 0
        self.num_seen = 0  # output tokens

    def take(self, ids: Iterable[int], eos_id: int) -> None:
        for token_id in ids:
            self.num_seen += 1
            if not self.is_open:
                self.is_open = token_id == self.after_token
            elif token_id != eos_id and self.matcher and not self.matcher.consume_token(token_id):
                log.warning("grammar left", reason=_reason(self.matcher))
                self.matcher = None


class Masks:
    """The callable that decode asks in every step. Belongs to one thread."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._states: WeakKeyDictionary[Output, _State] = WeakKeyDictionary()
        self._bits = compiler.bits()
        self._end = np.zeros(compiler.vocab_size, np.bool_)
        self._end[compiler.eos_id] = True

    @staticmethod
    def load(config: Config) -> Masks:
        """Raises: CheckpointError, ConfigError."""
        folder = model_folder.read(config)
        return Masks(Compiler(Vocabulary(folder.tokenizer_path), folder.vocab_size))

    def __call__(self, sequence: Output, drafts: tuple[int, ...]) -> list[Bools | None]:
        """Masks after ``sequence.ids + drafts[:i]`` for i = 0 .. len(drafts); None: all allowed.

        Rows behind a draft that its mask forbids are never drawn from; they are None."""
        state = self._advance(sequence)
        masks: list[Bools | None] = [None] * (len(drafts) + 1)
        is_open, num_taken = state.is_open, 0
        for i in range(len(drafts) + 1):
            mask = self._mask(state, is_open)
            masks[i] = mask
            if i == len(drafts):
                break
            draft = drafts[i]
            if not mask[draft] or draft == self._compiler.eos_id:
                break
            if not is_open:
                is_open = draft == state.after_token
            elif state.matcher is None or not state.matcher.consume_token(draft):
                break
            else:
                num_taken += 1
        if num_taken and state.matcher is not None and not state.matcher.rollback(num_taken):
            del self._states[sequence]  # built anew from the ids in the next step
        return masks

    def _advance(self, sequence: Output) -> _State:
        state = self._states.get(sequence)
        num_output = len(sequence.ids) - sequence.num_prompt
        if state is None or state.num_seen > num_output:
            grammar = sequence.grammar
            assert grammar is not None
            try:
                matcher = self._compiler.matcher(grammar)
            except InvalidRequest as error:  # the gateway has checked it: cannot happen
                log.error("grammar refused", reason=error.message)
                matcher = None
            state = self._states[sequence] = _State(matcher, grammar.after_token)
        state.take(sequence.ids[sequence.num_prompt + state.num_seen :], self._compiler.eos_id)
        return state

    def _mask(self, state: _State, is_open: bool) -> Bools:
        if not is_open:
            return self._thinking(state.after_token)
        if state.matcher is None or state.matcher.is_stopped():
            return self._end
        mask = self._compiler.fill(state.matcher, self._bits)
        if state.matcher.is_error():
            log.warning("grammar too complex", reason=_reason(state.matcher))
            state.matcher = None
            return self._end
        return mask

    def _thinking(self, after_token: int) -> Bools:
        """While thinking: all text, and of the control tokens only the one that ends it."""
        mask = np.ones(self._compiler.vocab_size, np.bool_)
        mask[self._compiler.special_ids] = False
        mask[after_token] = True
        return mask
