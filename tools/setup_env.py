"""The environment of the Makefile: .venv with torch, this project's requirements, and pip's progress in sight.

  python3 tools/setup_env.py create                      make .venv; a torch that python3 can import is shared with it
  .venv/bin/python tools/setup_env.py torch WORD...      pip install WORD... unless torch can be imported
  .venv/bin/python tools/setup_env.py install FILE [PROGRAM...]   pip install -r FILE, with its programs in .venv/bin

An existing .venv is used as it is.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

VENV = Path(".venv")
PYTHONS = ((3, 10), (3, 13))
OLDEST_TORCH = (2, 9)


def fail(sentence):
    sys.exit("zipccl: " + sentence)


def check_python():
    lowest, highest = PYTHONS
    if not lowest <= sys.version_info[:2] <= highest:
        fail(
            "{} is Python {}.{}, but zipccl needs 3.{} to 3.{}: type make PYTHON=python3.{} (after removing .venv if "
            "there is one).".format(sys.executable, *sys.version_info[:2], lowest[1], highest[1], highest[1])
        )


def torch_version(python):
    """(major, minor) of the torch that this Python imports, or None."""
    code = "import torch; print(torch.__version__)"
    run = subprocess.run([str(python), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if run.returncode:
        return None
    return tuple(int(part) for part in run.stdout.decode().split(".")[:2])


def usable_torch(python):
    version = torch_version(python)
    return version is not None and version >= OLDEST_TORCH


def runs(python, *args):
    return subprocess.run([str(python), *args], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def pip(*args):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
    print("+", *command, flush=True)
    if subprocess.run(command).returncode:
        fail("pip failed (its message is above): type the same make command to try again.")


def create():
    check_python()
    python = VENV / "bin" / "python"
    if VENV.exists():
        if not python.exists() or not runs(python, "-c", "0"):
            fail(f"{python} does not run: remove .venv and type the same make command again.")
        if not runs(python, "-m", "pip", "--version") and not runs(python, "-m", "ensurepip"):
            fail(".venv has no pip: remove .venv and type the same make command again.")
        return
    try:
        import ensurepip  # noqa: F401  Debian ships Python without it
        import venv
    except ImportError:
        fail("this Python cannot make virtual environments: install its venv (Debian: apt-get install python3-venv).")
    share = usable_torch(sys.executable)
    print("Creating .venv" + (", sharing this Python's torch" if share else ""), flush=True)
    venv.create(str(VENV), with_pip=True, system_site_packages=share, symlinks=True)
    if share and sys.prefix != sys.base_prefix:
        # This Python is itself a virtual environment: system_site_packages names its base, not it.
        inside = subprocess.check_output(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
        )
        own = {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}
        Path(inside.decode().strip(), "shared-torch.pth").write_text("\n".join(sorted(own)) + "\n")


def torch(words):
    check_python()
    # Before a long download, not after it.
    if not shutil.which(os.environ.get("CXX", "c++").split()[0]):
        fail("no C++ compiler: install one (Debian, Ubuntu: apt-get install g++) or set CXX.")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        fail("this Python has no Python.h: install its headers (Debian, Ubuntu: apt-get install python3-dev).")
    if not usable_torch(sys.executable):
        pip("install", *words, "numpy")
    if not usable_torch(sys.executable):
        fail("torch {}.{} or later cannot be imported after pip install {}.".format(*OLDEST_TORCH, " ".join(words)))


def install(requirements, *programs):
    pip("install", "--quiet", "-r", requirements)
    if not all((VENV / "bin" / program).exists() for program in programs):
        # Satisfied by a shared environment, whose programs are not in this one.
        pip("install", "--quiet", "--ignore-installed", "-r", requirements)


if __name__ == "__main__":
    step, words = sys.argv[1], sys.argv[2:]
    if step == "create":
        create()
    elif step == "torch":
        torch(words)
    elif step == "install":
        install(*words)
    else:
        fail("unknown step " + step)
