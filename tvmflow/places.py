"""The paths in a config: where they stand, and how a manifest keeps them without naming folders of one machine."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def path_keys(raw: Mapping[str, Any]) -> Iterator[tuple[Any, str, str]]:
    """Every table of a config that may hold a path, the path's key in it, and both as one dotted place."""
    for section, key in (("model", "path"), ("model", "folder"), ("verify", "inputs"), ("tuning", "database")):
        yield raw.get(section), key, f"{section}.{key}"
    kernels = raw.get("kernels")
    for name, kernel in kernels.items() if isinstance(kernels, dict) else ():
        yield kernel, "folder", f"kernels.{name}.folder"


def without_places(values: Mapping[str, Any], base: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """A config's plain values with paths relative to the folder `base`; and the paths as they were, by place.

    A path that leads there through the root of the file system says as much as an absolute one: its name alone is kept.
    """
    plain, paths = copy.deepcopy(dict(values)), {}
    for table, key, place in path_keys(plain):
        path = table.get(key) if isinstance(table, dict) else None
        if not isinstance(path, str) or not os.path.isabs(path):
            continue
        paths[place] = path
        if os.path.commonpath([path, base]) != os.sep or path == os.sep:
            table[key] = os.path.relpath(path, base)
        else:
            table[key] = os.path.basename(path)
    return plain, paths


def with_places(values: Mapping[str, Any], paths: Mapping[str, str], base: Path) -> dict[str, Any]:
    """The values with the paths that `paths` has by place, where theirs leads nowhere from the folder `base`."""
    plain = copy.deepcopy(dict(values))
    for table, key, place in path_keys(plain):
        path = table.get(key) if isinstance(table, dict) else None
        if place in paths and isinstance(path, str) and not os.path.exists(os.path.join(base, path)):
            table[key] = paths[place]
    return plain
