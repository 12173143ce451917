"""Draws what codec.py measured as an SVG: GB/s over the tensor's size, encode beside decode.

    python benchmarks/plot_codec.py results/codec-h200.json codec-h200.svg

"limit" is what a copy in the same run allows for the bytes that a codec at the ratio of zipccl's first code must move.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from html import escape
from pathlib import Path

import harness

WIDTH, HEIGHT = 460, 340  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 34, 44
COLOURS = ["#0b62c4", "#8a8a8a", "#d1495b", "#edae49", "#2e933c", "#7b2d8b"]


def series(facts: dict, way: str) -> dict[str, list[tuple[int, float]]]:
    """Name to (bytes, GB/s), by size. way: "encode" or "decode"."""
    rate, share = f"{way}_gbps", f"{way}_share"
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in facts["rows"]:
        lines.setdefault(f"zipccl {row['code']}", []).append((row["bytes"], row[rate]))
        if row["code"] == facts["codes"][0]:
            lines.setdefault("limit", []).append((row["bytes"], row[rate] / row[share]))
    for row in facts["rivals"]:
        lines.setdefault(row["rival"], []).append((row["bytes"], row[rate]))
    return lines


class Axes:
    """Both logarithmic."""

    def __init__(self, points: list[tuple[int, float]]):
        sizes, rates = zip(*points, strict=True)
        self.first, self.last = math.log2(min(sizes)), math.log2(max(sizes))
        self.low, self.high = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)))

    def x(self, size: float) -> float:
        span = max(self.last - self.first, 1)
        return LEFT + (math.log2(size) - self.first) / span * (WIDTH - LEFT - RIGHT)

    def y(self, rate: float) -> float:
        span = max(self.high - self.low, 1)
        return HEIGHT - BOTTOM - (math.log10(rate) - self.low) / span * (HEIGHT - TOP - BOTTOM)


def text(x: float, y: float, said: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(said)}</text>'


def panel(title: str, lines: dict[str, list[tuple[int, float]]], axes: Axes) -> list[str]:
    parts = [text(WIDTH / 2, 18, title, extra=' font-weight="bold"')]
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    for power in range(axes.low, axes.high + 1):
        y = axes.y(10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(text(LEFT - 6, y + 4, f"{10.0**power:g}", "end"))
    for size in sorted({size for points in lines.values() for size, _ in points}):
        parts.append(text(axes.x(size), floor + 16, harness.show_size(size).removesuffix("iB").replace(" ", "")))
    parts.append(text((LEFT + right) / 2, HEIGHT - 8, "bytes of the tensor"))
    for colour, points in zip(COLOURS, lines.values(), strict=False):
        path = " ".join(f"{axes.x(size):.1f},{axes.y(rate):.1f}" for size, rate in sorted(points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{axes.x(size):.1f}" cy="{axes.y(rate):.1f}" r="2.5" fill="{colour}"/>'
            for size, rate in points
        ]
    return parts


def draw(facts: dict) -> str:
    panels = {f"{way}, GB/s": series(facts, way) for way in ("encode", "decode")}
    axes = Axes([point for lines in panels.values() for points in lines.values() for point in points])
    width, height = WIDTH * len(panels), HEIGHT + 48
    font = 'font-family="sans-serif" font-size="11"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {font}>']
    out.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for i, (title, lines) in enumerate(panels.items()):
        out += [f'<g transform="translate({WIDTH * i}, 0)">', *panel(title, lines, axes), "</g>"]
    names = list(next(iter(panels.values())))
    for i, (colour, name) in enumerate(zip(COLOURS, names, strict=False)):
        x = LEFT + i * (width - LEFT) / len(names)
        out.append(f'<rect x="{x:.1f}" y="{HEIGHT + 6}" width="14" height="4" fill="{colour}"/>')
        out.append(text(x + 18, HEIGHT + 12, name, "start"))
    out.append(text(width / 2, HEIGHT + 36, f"{facts['device']}, {facts['values']}, {facts['date'][:10]}"))
    return "\n".join([*out, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="of codec.py --json")
    parser.add_argument("svg", type=Path)
    args = parser.parse_args()
    facts = json.loads(args.results.read_text())
    if facts.get("what") != "codec" or not facts.get("codes"):
        parser.error(f"{args.results}: not results of codec.py")
    args.svg.write_text(draw(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
