"""docs/vllm.md names tests, settings and counters that there are."""

from __future__ import annotations

import re
from pathlib import Path

from kvx.vllm import compat, config

HERE = Path(__file__).resolve().parent
TEXT = (HERE.parents[2] / "docs" / "vllm.md").read_text()


def test_the_tests_that_it_names_are_there() -> None:
    named = re.findall(r"`(?:(test_\w+)|)::(test_\w+)`", TEXT)
    assert len(named) > 20
    defined = {name for path in HERE.glob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    assert {test for _, test in named} <= defined
    assert {file for file, _ in named if file} <= {path.stem for path in HERE.glob("test_*.py")}


def test_the_groups_of_real_servers_that_it_names_are_there() -> None:
    groups = (HERE.parents[2] / "tests" / "e2e" / "groups.py").read_text()
    named = set(re.findall(r"`tests/e2e` groups? ((?:`\w+`(?:, )?)+)", TEXT))
    words = {word for some in named for word in re.findall(r"\w+", some)}
    assert words and words <= set(re.findall(r'^    "(\w+)": \w+,$', groups, re.M))


def test_the_settings_that_it_names_are_those_that_are_read() -> None:
    table = TEXT.split("## Settings")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines() if row.startswith("| `"))))
    read = set(re.findall(r'take\.\w+\("(\w+)"', Path(config.__file__).read_text())) - {"kv_lease_duration"}
    assert named == read


def test_the_versions_that_it_names_are_those_that_were_tested() -> None:
    rows = TEXT.split("## Versions")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| (\d[\w.]*)", rows, re.M)) == set(compat.TESTED)


def test_the_counters_that_it_names_are_those_that_there_are() -> None:
    metrics = (Path(config.__file__).parent / "metrics.py").read_text()
    there = set(re.findall(r'^    "(\w+)": "', metrics.split("COUNTERS")[1].split("}")[0], re.M))
    table = TEXT.split("## What can be seen")[1].split("\n## ")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == there
