"""Environment variables: unknown ones are named once, and README's tables list those that are known."""

import re
import warnings
from pathlib import Path

import pytest
import ranks
import torch.distributed as dist
import zipccl
from zipccl import environment

README = Path(__file__).resolve().parents[1] / "README.md"


def messages(caught):
    return [str(w.message) for w in caught if "environment variable" in str(w.message)]


def warned(rank, backend):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks.init(backend)
        if backend == "gloo":
            assert messages(caught) == []
            zipccl.attach()
        dist.new_group(backend="zipccl")
    return messages(caught)


@pytest.mark.parametrize("backend", ["zipccl", "gloo"])
def test_unknown_variables_are_named_once_with_what_may_be_meant(backend):
    env = {"ZIPCCL_ALLGATHER": "zip", "ZIPCCL_MINBYTES": "5", "ZIPCCL_XYZ": "", "ZIPCCL_DEBUG": "OFF"}
    said = [
        "zipccl reads no environment variable ZIPCCL_ALLGATHER; is ZIPCCL_ALL_GATHER meant?",
        "zipccl reads no environment variable ZIPCCL_MINBYTES; is ZIPCCL_MIN_BYTES meant?",
        f"zipccl reads no environment variable ZIPCCL_XYZ; it reads {', '.join(environment.KNOWN)}",
    ]
    assert ranks.run(warned, 2, backend, env=env) == [said, said]


def test_known_variables_are_taken_without_a_word():
    values = {"ZIPCCL_ALL_GATHER": "zip", "ZIPCCL_CUDA": "0", "ZIPCCL_ISA": "scalar", "ZIPCCL_INNER": "gloo"}
    assert ranks.run(warned, 1, "zipccl", env=values) == [[]]


def variables_in_tables():
    """Those of README's tables that have a column named Environment."""
    found, column = set(), None
    for line in README.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if "Environment" in cells:
            column = cells.index("Environment")
        elif not cells:
            column = None
        elif column is not None:
            named = re.findall(r"`(ZIPCCL_\w+)`", cells[column])
            if cells[column].endswith("..."):  # and so on, as the options of that row
                named = [f"ZIPCCL_{option.upper()}" for option in re.findall(r"`(\w+)`", cells[0])]
            assert not found & set(named)
            found |= set(named)
    return found


def test_readme_lists_every_variable():
    assert variables_in_tables() == set(environment.KNOWN)
