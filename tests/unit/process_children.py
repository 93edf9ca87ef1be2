"""What test_process.py runs in processes of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

from tvmflow.errors import ModelError
from tvmflow.process import emit, memory_limit_bytes


def add(a: int, b: int = 1) -> int:
    emit("adding")
    return a + b


def fail() -> None:
    raise ModelError("bad file", "mend it")


def bug() -> None:
    print("on the way")
    raise ValueError("first\nsecond")


def die(number: int) -> None:
    print("last words", flush=True)
    os.kill(os.getpid(), number)


def linger(folder: Path) -> None:
    (folder / "part").write_text(str(os.getpid()))
    (folder / "part").rename(folder / "pid")
    time.sleep(600)


def leave() -> None:
    os._exit(3)


def variable(name: str) -> str | None:
    return os.environ.get(name)


def has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def grow(size_bytes: int) -> None:
    block = bytearray(size_bytes)
    block[::4096] = b"1" * len(block[::4096])


def hoard(size_bytes: int) -> None:
    emit("hoarding")
    block = b"1" * size_bytes
    time.sleep(600)
    del block


def have_hoarded(size_bytes: int) -> None:
    code = f"import time; block = b'1' * {size_bytes}; time.sleep(600)"
    subprocess.run([sys.executable, "-c", code], check=True)


def allowed() -> float:
    return memory_limit_bytes()


class Family:
    """Whose members are no functions of a module."""

    @classmethod
    def of(cls, number: int) -> int:
        return number

    @staticmethod
    def plain(number: int) -> int:
        return number
