"""A process that tries grammars, so that one which explodes can be killed.

Started by the gateway: ``python -P -m decant.services.grammar_check TOKENIZER_JSON VOCAB_SIZE``.
Prints ``{}`` once ready; then for each line ``{"kind": ..., "text": ...}`` on stdin one line
``{"error": ""}`` on stdout, with the reason if the grammar cannot be used.
"""

from __future__ import annotations

import json
import resource
import sys

from decant.protocol.errors import InvalidRequest
from decant.protocol.messages import Grammar
from decant.services import process
from decant.services.chat.vocabulary import Vocabulary
from decant.services.grammar import Compiler

MAX_MEMORY = 4 << 30


def try_grammar(compiler: Compiler, grammar: Grammar) -> str:
    """Why it cannot be used; empty if it can. The first mask is part of the trial."""
    try:
        matcher = compiler.matcher(grammar)
        mask = compiler.fill(matcher, compiler.bits())
    except (InvalidRequest, ValueError, RecursionError, MemoryError) as error:
        return str(error) or type(error).__name__
    if matcher.is_error():
        return f"the grammar is too complex: {(matcher.get_error() or '')[:200]}"
    return "" if mask.any() else "the grammar allows nothing"


def main() -> None:
    process.die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiler = Compiler(Vocabulary(sys.argv[1]), int(sys.argv[2]))
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        error = try_grammar(compiler, Grammar(request["kind"], request["text"]))
        print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    main()
