"""Numbers as tables show them."""

from __future__ import annotations


def scientific(value: float | None) -> str:
    """Three digits and an exponent; nothing where there is no value."""
    return "" if value is None else f"{value:.2e}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def size(size_bytes: float) -> str:
    """Bytes in the unit that leaves the fewest digits."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} GiB"


def seconds(duration_s: float) -> str:
    return f"{duration_s * 1e3:.3g} ms" if duration_s < 1 else f"{duration_s:.3g} s"


def count(number: int, noun: str) -> str:
    """ "1 bucket", "2 buckets"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
