"""How large a kernel becomes when each buffer's values are computed wherever they are read, as a schedule may ask for.

TVM writes a value down once for each time that it is read, so that 60 buffers, each of which reads the one before it
twice, become more than memory holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tvmflow.database.grammar.graph import GrammarError, Graph

MOST = 1_000_000  # reads in one expression


def check(graph: Graph, expressions: frozenset[str]) -> None:
    """Raises GrammarError where a workload becomes too large."""
    reads: dict[int, Counter[int]] = {}
    sources: dict[int, Counter[int]] = {}
    for index, label in graph.labels.items():
        data = graph.value(index)
        if label in expressions or label == "[expression]":
            children = data if isinstance(data, list) else [child for child in data.values() if type(child) is int]
            found: Counter[int] = Counter()
            for child in children:
                found.update(reads.get(child, {}))
            if label == "ir.TensorLoad":
                found[data["source"]] += 1
            if found:
                reads[index] = found
        elif label == "tirx.BufferStore":
            own = Counter(reads.get(data["value"], {}))
            del own[data["buffer"]]  # a reduction goes on with what it has
            known = sources.setdefault(data["buffer"], Counter())
            sources[data["buffer"]] = known | own
    _check_sizes(sources)


def _check_sizes(sources: Mapping[int, Counter[int]]) -> None:
    """Each buffer's size is one, and those of all that it reads; buffers that read each other are never inlined."""
    sizes: dict[int, int] = {}
    left = dict(sources)
    while ready := [buffer for buffer, read in left.items() if not any(other in left for other in read)]:
        for buffer in ready:
            sizes[buffer] = 1 + sum(times * sizes.get(other, 1) for other, times in left.pop(buffer).items())
            if sizes[buffer] > MOST:
                raise GrammarError(f"becomes more than {MOST} reads when all is inlined")
