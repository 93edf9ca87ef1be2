"""The tuning database. No TVM in here: records are text, and only `tuning` and `build` give them meaning."""

from tvmflow.database.comparison import Comparison, Convolution
from tvmflow.database.files import Fault
from tvmflow.database.keys import KeyParts, canonical, difference, fingerprint
from tvmflow.database.lookup import Match, Miss
from tvmflow.database.record import Provenance, Record, better, pack, unpack
from tvmflow.database.store import Accused, Added, Reading, Store

__all__ = [
    "Accused",
    "Added",
    "Comparison",
    "Convolution",
    "Fault",
    "KeyParts",
    "Match",
    "Miss",
    "Provenance",
    "Reading",
    "Record",
    "Store",
    "better",
    "canonical",
    "difference",
    "fingerprint",
    "pack",
    "unpack",
]
