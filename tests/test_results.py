"""README.md and docs/: tables are what benchmarks/results say, every result is quoted, and links lead somewhere."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from zipccl import _C

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import tables  # noqa: E402

PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.json"))


def test_tables_are_what_the_results_say():
    for page in tables.PAGES:
        text = (ROOT / page).read_text()
        assert tables.rewritten(text) == text, f"{page}: run python benchmarks/tables.py"


def test_every_table_stands_somewhere():
    standing = {
        name for page in tables.PAGES for name in re.findall(r"<!-- table (\w+) -->", (ROOT / page).read_text())
    }
    assert standing == tables.TABLES.keys()


def test_a_number_typed_by_hand_is_noticed(tmp_path):
    text = (ROOT / "README.md").read_text()
    changed = text.replace("54.9 ms", "53.9 ms")
    assert changed != text and tables.rewritten(changed) == text
    with pytest.raises(KeyError):
        tables.rewritten(text.replace("table gains", "table losses"))
    done = subprocess.run([sys.executable, ROOT / "benchmarks/tables.py", "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    "x, n, text", [(9.0, 3, "9.00"), (560.4, 3, "560"), (2291.3, 3, "2291"), (0.0466, 3, "0.0466")]
)
def test_digits(x, n, text):
    assert tables.digits(x, n) == text


def test_what_is_expected_is_what_auto_would_expect():
    """The README's arithmetic and the switcher's model of a link without latency."""
    head, *rows = tables.expected()
    links = [float(cell.removesuffix(" Gbit/s")) / 8 * 1e9 for cell in head[1:]]
    for said, *cells in rows:
        code, op = said.split()[-1], said.split(",")[0]
        of = next(r for r in tables.h200_rows() if r["bytes"] == 1 << 28 and r["code"] == code)
        for link, cell in zip(links, cells, strict=True):
            switcher = _C.Switcher(of["frame_bytes"] / of["bytes"])
            switcher.set_measurements(0, link, 0, 1e9 * of["encode_gbps"], 1e9 * of["decode_gbps"])
            decision = switcher.explain(op, 8, 1 << 40, ["raw", "zip"])
            assert float(cell) == pytest.approx(decision.raw_seconds / decision.zip_seconds, abs=0.01)


def test_every_result_is_linked():
    linked = {match for page in PAGES for match in re.findall(r"benchmarks/results/([\w-]+)\.json\)", page.read_text())}
    assert linked == {path.stem for path in RESULTS}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_what_was_timed_was_right(path):
    """Collectives and codecs count values that came back wrong."""

    def found(value):
        if isinstance(value, dict):
            yield from (v == 0 for k, v in value.items() if k == "mismatches")
            yield from (v for k, v in value.items() if k in ("exact", "ranks_alike"))
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                yield from found(item)

    assert all(found(json.loads(path.read_text())))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    def anchors(text):
        heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}

    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link
