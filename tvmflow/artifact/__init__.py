"""The artifact: a folder (or one zip file) with a library, its constants and a manifest. No TVM in here.

    library.so       the compiled kernels and the calls between them
    constants.bin    the weights, each at a 64-byte boundary, as the manifest lists them
    manifest.json    what is inside, how it was made, what was verified
    build.log.json   of the machine that built it: times, memory, places of files; not needed, and in no zip

With buckets, constants.bin holds the weights of all of them, each once, and a folder per bucket, named after its sizes,
is an artifact whose constants.bin is the one above it.

A folder appears whole or not at all, and one that replaces another takes its place in one step (`publishing`). Who
reads it holds on to one version until he is done (`folder`).
"""

from __future__ import annotations

from tvmflow.artifact.checks import check_machine, check_source
from tvmflow.artifact.folder import was_replaced
from tvmflow.artifact.layout import (
    ALIGNMENT,
    CONSTANTS,
    FORMAT_VERSION,
    LIBRARY,
    LOG,
    MANIFEST,
    SHARED_CONSTANTS,
    file_entry,
)
from tvmflow.artifact.publishing import staging
from tvmflow.artifact.reading import (
    base_of,
    check_files,
    libraries,
    opened,
    opened_any,
    opened_unchecked,
    read,
    read_manifest,
)
from tvmflow.artifact.writing import finish, write_manifest

__all__ = [
    "ALIGNMENT",
    "CONSTANTS",
    "FORMAT_VERSION",
    "LIBRARY",
    "LOG",
    "MANIFEST",
    "SHARED_CONSTANTS",
    "base_of",
    "check_files",
    "check_machine",
    "check_source",
    "file_entry",
    "finish",
    "libraries",
    "opened",
    "opened_any",
    "opened_unchecked",
    "read",
    "read_manifest",
    "staging",
    "was_replaced",
    "write_manifest",
]
