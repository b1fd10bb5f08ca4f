"""The examples in the documents are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def blocks(document: Path) -> list[tuple[int, str]]:
    """The Python in a document, each block with its line."""
    text = document.read_text("utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text[: block.start()].count("\n") + 1, block[1]) for block in found]


@pytest.mark.parametrize("name", ["docs/python.md", "kvx-python/README.md", "README.md"])
def test_examples_run_from_top_to_bottom(root: Path, name: str) -> None:
    document = root.parent / name
    there = blocks(document)
    assert there, "there is no example"
    names: dict[str, object] = {"__name__": "examples"}
    for line, code in there:
        # As many lines before it as in the document, so that what fails is found there.
        exec(compile("\n" * line + code, str(document), "exec"), names)


def test_what_is_public_is_documented() -> None:
    import kvx

    for name in kvx.__all__:
        documented = getattr(kvx, name)
        if isinstance(documented, type) or callable(documented):
            assert documented.__doc__, name
            for member, value in vars(documented).items() if isinstance(documented, type) else ():
                if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                    assert getattr(value, "__doc__", None), f"{name}.{member}"
