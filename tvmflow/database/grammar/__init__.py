"""What a tuning record may hold: a closed grammar of traces and workloads. No TVM in here.

A record comes from whoever wrote it, and TVM's own formats can say far more than a schedule: link code into a library,
leave parts of a kernel out, compute in fewer bits, or keep the compiler busy for ever. So what is not listed here is no
record, whatever TVM would do with it.
"""

from tvmflow.database.grammar.annotations import Where
from tvmflow.database.grammar.graph import GrammarError
from tvmflow.database.grammar.trace import check as check_trace
from tvmflow.database.grammar.workload import check as check_workload

__all__ = ["GrammarError", "Where", "check_trace", "check_workload"]
