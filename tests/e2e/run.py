"""Runs two real vLLM servers with kvx between them, and compares their tokens with those of one.

    python tests/e2e/run.py --venv VENV [--work FOLDER] [GROUP...]

VENV is a virtual environment with vLLM and kvx. Groups are run one after the other, each with servers of its own; without a name all are.
The exit status is 1 if something did not hold.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import groups
from checks import Failed
from client import Refused
from servers import Setting

HERE = Path(__file__).resolve().parent


def key_file(path: Path) -> Path:
    """A key for this run, which its owner alone may read."""
    if not path.exists():
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"kvx-key-1:{secrets.token_hex(32)}\n")
    return path


def main() -> int:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="a virtual environment with vLLM and kvx")
    parser.add_argument("--work", type=Path, default=Path("target/e2e"), help="where models, keys and logs go")
    parser.add_argument("--list", action="store_true", help="says which groups there are")
    parser.add_argument("groups", nargs="*", help="what to run")
    asked = parser.parse_args()
    if asked.list:
        print("\n".join(f"{name:12} {function.__doc__.splitlines()[0]}" for name, function in groups.ALL.items()))
        return 0
    work = asked.work.resolve()
    (work / "models").mkdir(parents=True, exist_ok=True)
    python = asked.venv.absolute() / "bin" / "python"
    subprocess.run([python, HERE / "models.py", work / "models"], check=True, capture_output=True)
    failed = 0
    for name in asked.groups or groups.ALL:
        logs = work / "logs" / name
        logs.mkdir(parents=True, exist_ok=True)
        for old in logs.glob("*.log"):
            old.unlink()
        setting = Setting(asked.venv.absolute(), work / "models" / "llama", key_file(work / "key"), logs)
        begun = time.monotonic()
        try:
            for line in groups.ALL[name](setting):
                print(f"{name}: {line} ({time.monotonic() - begun:.0f} s)", flush=True)
        except (Failed, Refused, RuntimeError, OSError) as error:
            failed += 1
            print(f"{name}: FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
