"""The names in an artifact, and what tells a file's content from any other."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tvmflow.manifest import FileEntry

FORMAT_VERSION = 1
LIBRARY, CONSTANTS, MANIFEST, LOG = "library.so", "constants.bin", "manifest.json", "build.log.json"
SHARED_CONSTANTS = f"../{CONSTANTS}"  # what a bucket's manifest calls the weights of all buckets
ALIGNMENT = 64  # bytes; what TVM's kernels may assume of a buffer's address
MOST_MANIFEST_BYTES = 32 << 20
AGAIN = "compile the model again"


def file_entry(path: Path) -> FileEntry:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileEntry(sha256=digest, size_bytes=path.stat().st_size)
