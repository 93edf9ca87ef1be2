"""Random expressions, and every value that their arithmetic allows, by numpy.

What is allowed is IEEE 754's result, rounded operation by operation, or with a product and a sum rounded once. With
`widen_half` float16 and bfloat16 are computed in float32 and rounded in conversions alone.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import ml_dtypes
import numpy as np

SIZE = 64
MAX_FUSED = 6  # sums of products in an expression; each doubles or trebles the values that are allowed
FLOATS = ("float32", "float64", "float16", "bfloat16")
NARROW = ("float16", "bfloat16")
EDGES = {
    "float32": "float32",
    "float64": "float64",
    "float16": "float32",
    "bfloat16": "float32",
    "int32": "int32",
    "int64": "int64",
    "uint8": "uint8",
}
CONVERSIONS = {  # which numpy and TVM define alike for all values
    "float32": ("float64", "float16", "bfloat16"),
    "float64": ("float32",),
    "float16": ("float32",),
    "bfloat16": ("float32",),
    "int32": ("int8", "int64", "uint8"),
    "int64": ("int32", "uint8"),
    "uint8": ("int32",),
    "int8": ("int32",),
}
BINARY = ("Add", "Sub", "Mul", "Add", "Sub", "Mul", "Min", "Max")
COMPARE = {"Less": np.less, "LessOrEqual": np.less_equal, "Equal": np.equal, "Greater": np.greater}
CONSTANTS = (0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 4.0, 3.0, 0.1, 1e-3, 12582912.0, float("inf"), float("nan"))


@dataclass(frozen=True)
class Node:
    """An operation on earlier nodes, by their numbers; "Input" and "Constant" have a value in place of them."""

    op: str
    dtype: str
    args: tuple[int, ...] = ()
    value: float = 0.0


Expression = tuple[Node, ...]  # the last one is its result


def draw(rng: random.Random, home: str, length: int = 7) -> Expression:
    """An expression of a dtype, with a bounded number of sums of products."""
    while True:
        made = _drawn(rng, home, length)
        if len(_fusable(made)) <= MAX_FUSED and "Input" in {made[i].op for i in _used(made)}:
            return made


def _drawn(rng: random.Random, home: str, length: int) -> Expression:
    nodes = [Node("Input", home), Node("Input", home)]
    for _ in range(rng.randint(2, length)):
        nodes += _operation(rng, nodes)
    if nodes[-1].dtype != home:
        nodes += _way_back(nodes, home)
    return tuple(nodes)


def _operation(rng: random.Random, nodes: Sequence[Node]) -> list[Node]:
    """One more operation, mostly on what was made last, with the constant that it may need."""
    first = len(nodes) - 1 if rng.random() < 0.7 else rng.randrange(len(nodes))
    dtype, added = nodes[first].dtype, []
    alike = [number for number, node in enumerate(nodes) if node.dtype == dtype]

    def other() -> int:
        if rng.random() < 0.35:
            added.append(Node("Constant", dtype, value=_constant(rng, dtype)))
            return len(nodes) + len(added) - 1
        return rng.choice(alike)

    kind = rng.random()
    if kind < 0.15:
        return [Node("Cast", rng.choice(CONVERSIONS[dtype]), (first,))]
    if kind < 0.27:
        unary = ["Abs"] + (["Neg"] if dtype != "uint8" else []) + (["Sqrt"] if dtype in FLOATS else [])
        return [Node(rng.choice(unary), dtype, (first,))]
    if kind < 0.37:
        args = (first, other(), other(), other())
        return [*added, Node(rng.choice(tuple(COMPARE)), dtype, args)]
    pair = [first, other()]
    rng.shuffle(pair)
    ops = (*BINARY, "Div") if dtype in FLOATS else BINARY
    return [*added, Node(rng.choice(ops), dtype, tuple(pair))]


def _way_back(nodes: Sequence[Node], home: str) -> list[Node]:
    added: list[Node] = []
    dtype = nodes[-1].dtype
    while dtype != home:
        middle = home if home in CONVERSIONS[dtype] else {"float64": "float32"}.get(dtype, "float32")
        if home not in FLOATS:
            middle = home if home in CONVERSIONS[dtype] else "int32" if dtype != "int32" else "int64"
        added.append(Node("Cast", middle, (len(nodes) + len(added) - 1,)))
        dtype = middle
    return added


def _constant(rng: random.Random, dtype: str) -> float:
    if dtype in FLOATS:
        return rng.choice(CONSTANTS) if rng.random() < 0.8 else rng.uniform(-4, 4)
    info = np.iinfo(dtype)
    values = (0, 1, 2, 3, 7, int(info.max), int(info.min), *(() if dtype == "uint8" else (-1, -2)))
    return rng.choice(values)


def _used(nodes: Expression) -> set[int]:
    """The nodes that the result depends on."""
    found, waiting = set(), [len(nodes) - 1]
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += nodes[number].args
    return found


def _product(nodes: Expression, number: int) -> tuple[int, float] | None:
    """The product that a node is, and its sign."""
    sign = 1.0
    while (same := _same(nodes, nodes[number])) is not None:
        sign, number = sign * same[1], same[0]
    return (number, sign) if nodes[number].op == "Mul" else None


def _same(nodes: Expression, node: Node) -> tuple[int, float] | None:
    """The value that a node passes on as it is, and its sign."""
    if node.op == "Neg":
        return node.args[0], -1.0
    if node.op not in ("Add", "Sub", "Mul", "Div"):
        return None
    zero = -0.0 if node.op == "Add" else 0.0
    for number, other in (node.args, node.args[::-1])[: 1 if node.op in ("Sub", "Div") else 2]:
        known = nodes[other].value if nodes[other].op == "Constant" else math.nan
        if node.op in ("Mul", "Div") and abs(known) == 1:
            return number, known
        if node.op in ("Add", "Sub") and known == 0 and math.copysign(1, known) == math.copysign(1, zero):
            return number, 1.0
    return None


def _fusable(nodes: Expression) -> list[int]:
    return [
        number
        for number in sorted(_used(nodes))
        if nodes[number].op in ("Add", "Sub")
        and nodes[number].dtype in FLOATS
        and any(_product(nodes, arg) for arg in nodes[number].args)
    ]


def of(home: str, made: Callable[[Maker, int, int], int]) -> Expression:
    """An expression of two inputs, written down."""
    maker = Maker([Node("Input", home), Node("Input", home)])
    made(maker, 0, 1)
    return tuple(maker.nodes)


@dataclass
class Maker:
    """Nodes under construction: `maker.Add(a, b)` adds one and returns its number."""

    nodes: list[Node]

    def __getattr__(self, op: str) -> Callable[..., int]:
        return lambda *args: self._added(Node(op, self.nodes[args[-1]].dtype, args))

    def cast(self, value: int, dtype: str) -> int:
        return self._added(Node("Cast", dtype, (value,)))

    def number(self, value: float, like: int) -> int:
        return self._added(Node("Constant", self.nodes[like].dtype, value=value))

    def _added(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1


def numbers(rng: random.Random, dtype: str) -> np.ndarray:
    """Values among which are all that are special to a dtype."""
    edge = EDGES[dtype]
    if dtype not in FLOATS:
        info = np.iinfo(edge)
        special = [0, 1, 2, 3, 7, 100, info.max, info.max - 1, info.max - 2, info.min, info.min + 1, info.max // 2]
        drawn = [rng.randint(int(info.min), int(info.max)) for _ in range(SIZE - 2 * len(special))]
        values = [*special, *special, *drawn]
    else:
        info = ml_dtypes.finfo(dtype)
        top, tiny, denormal = float(info.max), float(info.tiny), float(info.smallest_subnormal)
        special = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            2.0,
            3.0,
            257.0,
            300.0,
            1e8,
            70000.0,
            top,
            -top,
            tiny,
            -tiny,
            denormal,
            3 * denormal,
            0.1,
            np.inf,
            -np.inf,
            np.nan,
            2.5,
            16777217.0,
        ]
        values = special + [
            rng.choice([1, -1]) * rng.uniform(1, 2) * 2.0 ** rng.randint(-12, 12) for _ in range(SIZE - len(special))
        ]
    rng.shuffle(values)
    with np.errstate(all="ignore"):
        return np.array(values, edge)


def allowed(nodes: Expression, inputs: Sequence[np.ndarray], widen_half: bool) -> list[np.ndarray]:
    """What an expression may be for its inputs, in the dtype that inputs and outputs have."""
    sums = _fusable(nodes)
    choices = [[None, *(place for place in (0, 1) if _product(nodes, nodes[number].args[place]))] for number in sums]
    found: dict[bytes, np.ndarray] = {}
    with np.errstate(all="ignore"):
        for chosen in itertools.product(*choices):
            value = _evaluated(nodes, inputs, dict(zip(sums, chosen, strict=True)), widen_half)
            found[value.tobytes()] = value
    return list(found.values())


def numpy_dtype(dtype: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, dtype)) if dtype == "bfloat16" else np.dtype(dtype)


def _evaluated(
    nodes: Expression, inputs: Sequence[np.ndarray], fused: Mapping[int, int | None], widen_half: bool
) -> np.ndarray:
    def carried(dtype: str) -> np.dtype:
        return np.dtype("float32") if widen_half and dtype in NARROW else numpy_dtype(dtype)

    given, values, known = iter(inputs), [], set[int]()
    for number, node in enumerate(nodes):
        args = [values[arg] for arg in node.args]
        if node.op == "Input":
            value = next(given).astype(numpy_dtype(node.dtype))
        elif node.op == "Constant":
            value = (
                np.full(SIZE, node.value).astype(numpy_dtype(node.dtype))
                if node.dtype in FLOATS
                else np.full(SIZE, int(node.value), node.dtype)
            )
        elif node.op == "Cast":
            value = args[0].astype(numpy_dtype(nodes[node.args[0]].dtype)).astype(numpy_dtype(node.dtype))
        elif (place := fused.get(number)) is not None:
            value = _fused(nodes, values, number, place)
        else:
            value = _computed(node.op, args)
        if node.op != "Input" and known.issuperset(node.args):  # what depends on constants alone is known, and rounded
            known.add(number)
            value = value.astype(numpy_dtype(node.dtype))
        values.append(value.astype(carried(node.dtype)))
    return values[-1].astype(numpy_dtype(nodes[-1].dtype)).astype(EDGES[nodes[-1].dtype])


def _computed(op: str, args: Sequence[np.ndarray]) -> np.ndarray:
    if op in COMPARE:
        return np.where(COMPARE[op](args[0], args[1]), args[2], args[3])
    simple = {
        "Add": np.add,
        "Sub": np.subtract,
        "Mul": np.multiply,
        "Div": np.divide,
        "Neg": np.negative,
        "Abs": np.abs,
        "Sqrt": np.sqrt,
    }
    if op in simple:
        return np.asarray(simple[op](*args))
    a, b = args
    best = np.maximum(a, b) if op == "Max" else np.minimum(a, b)
    return np.asarray(best + best.dtype.type(0))  # which of two zeros it is, is not said


def _fused(nodes: Expression, values: Sequence[np.ndarray], number: int, place: int) -> np.ndarray:
    """A sum whose operand at `place` is a product that was not rounded."""
    found = _product(nodes, nodes[number].args[place])
    assert found is not None
    a, b = (values[arg] for arg in nodes[found[0]].args)
    c = values[nodes[number].args[1 - place]]
    sign_a, sign_c = found[1], 1.0
    if nodes[number].op == "Sub":
        sign_a, sign_c = (found[1], -1.0) if place == 0 else (-found[1], 1.0)
    dtype = a.dtype
    if dtype == np.float64:
        terms = zip(a * sign_a, b, c * sign_c, strict=True)
        return np.array([_once(*map(float, numbers_)) for numbers_ in terms])
    product, term = a.astype("f8") * b.astype("f8") * sign_a, c.astype("f8") * sign_c
    total = product + term
    error = (product - (total - (total - product))) + (term - (total - product))
    odd = total.view("i8") & 1  # rounded to odd in float64, what is rounded once more is right
    inexact = np.isfinite(total) & np.isfinite(error) & (error != 0) & (odd == 0)
    total = np.where(inexact, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return total.astype("float32").astype(dtype) if dtype == np.float32 else total.astype(dtype)


def _once(a: float, b: float, c: float) -> float:
    """a * b + c in float64, rounded once."""
    if np.isfinite(a) and np.isfinite(b) and not np.isfinite(c):
        return c
    if not all(map(np.isfinite, (a, b))):
        return float(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return float(np.copysign(0.0, np.float64(a)) * np.copysign(1.0, b) + np.float64(c)) if a * b == 0 == c else 0.0
    try:
        return float(exact)
    except OverflowError:
        return np.inf if exact > 0 else -np.inf


def agree(got: np.ndarray, wanted: Sequence[np.ndarray]) -> np.ndarray:
    """Per element whether it is one of those wanted: the same bits, but for NaN."""
    return np.logical_or.reduce([_equal(got, want) for want in wanted])


def _equal(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    if want.dtype.kind != "f":
        return np.asarray(got == want)
    return np.asarray(((got == want) & (np.signbit(got) == np.signbit(want))) | (np.isnan(got) & np.isnan(want)))
