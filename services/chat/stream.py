"""One choice's output ids to what its client sees: detokeniser, parser and stop strings in a row.

Deterministic in the ids and independent of how they are grouped into steps, so that a stream can
be replayed elsewhere and continue at the same character. Knows no sockets and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from decant.protocol.messages import Output, TokenLogprob, ToolDelta
from decant.services.chat.detokenizer import Detokenizer
from decant.services.chat.dsml import Parser, tools_from
from decant.services.chat.markers import DSML, END_THINK, THINK
from decant.services.chat.stops import StopMatcher
from decant.services.chat.vocabulary import Vocabulary


@dataclass
class Piece:
    """What one run of ids added; the fields of a ``TextDelta``."""

    num_ids: int = 0
    content: str = ""
    reasoning: str = ""
    tools: list[ToolDelta] = field(default_factory=list)
    finish_reason: str = ""
    matched_stop: str = ""
    num_reasoning_ids: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)


class ChoiceStream:
    """Feed runs of ids with ``push`` until ``finish_reason`` is set."""

    def __init__(self, vocabulary: Vocabulary, output: Output) -> None:
        self.num_ids = 0
        self.finish_reason = ""
        self._vocabulary = vocabulary
        self._is_plain = output.plain
        self._plain = ""  # text of a plain stream that is not collected yet
        self._skips_special = output.skip_special_tokens
        self._detokenizer = Detokenizer()
        self._stops = StopMatcher(output.stop, output.include_stop)
        self._min_tokens = output.min_tokens
        self._parser = Parser(
            output.thinking and not output.plain, tools_from(output.tools, output.tool_schemas)
        )
        self._dsml = vocabulary.ids[DSML]
        self._think = vocabulary.ids[THINK]
        self._end_think = vocabulary.ids[END_THINK]

    def push(
        self,
        ids: Sequence[int],
        finish_reason: str = "",
        stop_token_id: int = -1,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> Piece:
        """ids: [n] the tokens that follow; none are taken after the end.

        finish_reason: why the engine ended here ("stop" or "length"), or empty.
        stop_token_id: the id that stopped it, the last one; it is not shown.
        logprobs: one for each id, or none."""
        piece = Piece()
        last = len(ids) - 1
        for i, token_id in enumerate(ids):
            if self.finish_reason:
                break
            self.num_ids += 1
            piece.num_ids += 1
            was_reasoning = self._parser.is_reasoning
            piece.num_reasoning_ids += was_reasoning
            if logprobs:
                piece.logprobs.append(self._spell(logprobs[i], was_reasoning))
            if not (i == last and token_id == stop_token_id):
                self._token(token_id)
                self._collect(piece)
        if finish_reason and not self.finish_reason and piece.num_ids == len(ids):
            self._text(self._detokenizer.flush())
            self._parser.finish()
            self._collect(piece)
            piece.content += self._stops.flush()
            if not self.finish_reason:
                self._end(piece, finish_reason)
                is_named = stop_token_id >= 0 and stop_token_id not in self._vocabulary.special_ids
                piece.matched_stop = str(stop_token_id) if is_named else ""
        return piece

    def _token(self, token_id: int) -> None:
        if token_id not in self._vocabulary.added_ids:
            self._text(self._detokenizer.push(self._vocabulary.bytes_of(token_id)))
            return
        self._text(self._detokenizer.flush())
        if self._is_plain:
            if not (self._skips_special and token_id in self._vocabulary.special_ids):
                self._text(self._vocabulary.bytes_of(token_id).decode())
        elif token_id == self._dsml:
            self._parser.dsml()
        elif token_id == self._end_think:
            self._parser.end_think()
        elif token_id == self._think:
            self._parser.think()
        # Any other control token has no text in a chat.

    def _text(self, text: str) -> None:
        if self._is_plain:
            self._plain += text
        elif text:
            self._parser.text(text)

    def _collect(self, piece: Piece) -> None:
        """Move what became visible into the piece, content through the stop strings."""
        parsed = self._parser.take()
        if self._is_plain:
            parsed.content, self._plain = self._plain, ""
        piece.reasoning += parsed.reasoning
        for delta in parsed.tools:
            same = piece.tools and piece.tools[-1].index == delta.index and not delta.name
            if same:
                last = piece.tools.pop()
                delta = ToolDelta(
                    last.index,
                    last.name,
                    last.arguments + delta.arguments,
                    last.is_complete or delta.is_complete,
                )
            piece.tools.append(delta)
        if self.num_ids <= self._min_tokens:
            piece.content += parsed.content
        else:
            piece.content += self._stops.push(parsed.content)
        if self._stops.matched and not self.finish_reason:
            piece.matched_stop = self._stops.matched
            self._end(piece, "stop")

    def _end(self, piece: Piece, reason: str) -> None:
        called = self._parser.num_complete > 0 and reason == "stop"
        self.finish_reason = piece.finish_reason = "tool_calls" if called else reason

    def _spell(self, logprob: TokenLogprob, is_reasoning: bool) -> TokenLogprob:
        """The logprob with the texts and bytes of its tokens."""
        raw = self._vocabulary.bytes_of(logprob.token_id)
        top = [self._vocabulary.bytes_of(i) for i in logprob.top_ids]
        return msgspec.structs.replace(
            logprob,
            text=raw.decode("utf-8", "replace"),
            raw=raw,
            top_raw=top,
            top_text=[t.decode("utf-8", "replace") for t in top],
            channel="reasoning" if is_reasoning else "content",
        )
