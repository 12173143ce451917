"""Bits per value of the codes for every dtype, on tensors of training.

    python examples/train_gpt.py --dump DIR     trains, and saves tensors; how, stands in examples/dump.py
    python benchmarks/dtypes.py DIR/dtypes      one row for each of its files

Frames as collectives send them: header and tables included, no checksum. Every frame is decoded and compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import harness  # first: it makes the demo's helpers importable
import machine
import torch
import zipccl

CODES = ["fast", "dense"]
KINDS = ["weights", "gradients", "activations"]
DTYPES = [
    "bfloat16", "float16", "float32", "float32_of_bfloat16", "float32_of_float16", "float64", "float8_e4m3fn",
    "float8_e5m2",
]  # fmt: skip
COLUMNS = [
    ("dtype", f"{'dtype':>20}", "s"),
    ("kind", f"{'tensors':>12}", "s"),
    ("values", "values", "d"),
    ("raw_bits", "raw bits", "d"),
    *[(f"{code}_bits", code, ".2f") for code in CODES],
    ("dense_share", "dense/raw", ".3f"),
]


def measure(path: Path, kind: str, name: str) -> dict:
    """`name`: a dtype, and behind "_of_" the one whose values it holds."""
    dtype = getattr(torch, name.split("_of_")[0])
    values = torch.frombuffer(bytearray(path.read_bytes()), dtype=dtype)
    row = {"dtype": name.replace("_", " ") if "_of_" in name else name, "kind": kind, "values": len(values)}
    row["raw_bits"] = 8 * values.element_size()
    for code in CODES:
        frame = zipccl.compress(values, code, checksum=False)
        if not torch.equal(zipccl.decompress(frame).view(torch.uint8), values.view(torch.uint8)):
            raise SystemExit(f"{path}: other bits came back")
        row[f"{code}_bits"] = 8 * len(frame) / len(values)
    return row | {"dense_share": row["dense_bits"] / row["raw_bits"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    files = [(args.directory / f"{kind}_{name}.bin", kind, name) for name in DTYPES for kind in KINDS]
    files = [file for file in files if file[0].is_file()]
    if not files:
        parser.error(f"{args.directory}: no files of train_gpt.py --dump")
    table = harness.Table(COLUMNS)
    for file in files:
        table.add(measure(*file))
    harness.write_json(args.json, machine.describe("cpu") | {"what": "dtypes", "rows": table.rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
