"""aider against decant: one question from its command line. Arguments: URL MODEL."""

import subprocess
import sys
import tempfile
from pathlib import Path

url, model = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    command = [
        str(Path(sys.executable).parent / "aider"),
        *("--model", f"openai/{model}", "--openai-api-base", url + "/v1"),
        *("--openai-api-key", "any", "--message", "Hello, who are you?", "--yes-always"),
        *("--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--no-git"),
        *("--no-show-release-notes", "--no-detect-urls", "--map-tokens", "0"),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
output = done.stdout + done.stderr
assert done.returncode == 0 and "Tokens:" in output, output
print("ok")
