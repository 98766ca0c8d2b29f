"""aider against decant: a question from its command line, whole and streamed. Arguments: URL MODEL.

aider calls no tools and asks for no structured output: it reads edits out of text (its "whole" and
"diff" formats), which a model must have learnt. So the text itself is what can be compared.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, model = sys.argv[1:]


def ask(*more: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).parent / "aider"),
            *("--model", f"openai/{model}", "--openai-api-base", url + "/v1"),
            *("--openai-api-key", "any", "--message", "Hello, who are you?", "--yes-always"),
            *("--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--no-git"),
            *("--no-show-release-notes", "--no-detect-urls", "--map-tokens", "0", "--no-pretty"),
            *("--chat-mode", "ask"),
            *more,
        ]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=240,
            stdin=subprocess.DEVNULL, env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0 and "Tokens:" in output, output
    return output.partition("Tokens:")[0].strip().splitlines()[-1]


whole, streamed = ask("--no-stream"), ask("--stream")
assert len(whole.split()) > 1 and streamed == whole, (whole, streamed)
print("ok")
