"""Rules of the source layout that no other tool checks: prints every break as file:line and exits with 1."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH_FREE = ("csrc/format", "csrc/codec", "csrc/quantizer", "csrc/policy")
TORCH_INCLUDE = re.compile(r'\s*#\s*include\s*[<"](torch|ATen|c10|pybind11|Python\.h)')
# Some toolchains link a second standard library into extensions, whose streams then lack their locale and crash. What
# torch makes of several arguments of a check is a stream too: pass one std::string.
STREAM = re.compile(r"\s*#\s*include\s*<(sstream|iostream|fstream|iomanip)>|.*\bstd::[io]?stringstream\b")
SOURCE_SUFFIXES = (".h", ".cuh", ".cpp", ".cu", ".py")
SOURCE_DIRS = ("csrc", "python", "tests", "benchmarks", "examples", "tools")
MAX_LINES = 600


def breaks(root: Path) -> list[str]:
    found = []
    for directory in SOURCE_DIRS:
        for path in sorted((root / directory).glob("**/*")):
            if path.suffix not in SOURCE_SUFFIXES:
                continue
            name = path.relative_to(root).as_posix()
            lines = path.read_text().splitlines()
            if len(lines) > MAX_LINES:
                found.append(f"{name}:{len(lines)}: more than {MAX_LINES} lines")
            if name.startswith("csrc/"):
                for number, line in enumerate(lines, 1):
                    if STREAM.match(line):
                        found.append(f"{name}:{number}: a C++ stream in the extension: {line.strip()}")
            if name.startswith(tuple(f"{layer}/" for layer in TORCH_FREE)):
                for number, line in enumerate(lines, 1):
                    if TORCH_INCLUDE.match(line):
                        found.append(f"{name}:{number}: torch header in a layer without torch: {line.strip()}")
    return found


if __name__ == "__main__":
    found = breaks(ROOT)
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)
