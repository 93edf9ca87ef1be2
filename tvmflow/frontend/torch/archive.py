"""What a `.pt2` file may hold: tensors and a description of a graph, and nothing that runs when it is loaded.

torch.export.load is made for files that one trusts. It unpickles Python objects, loads compiled libraries, evaluates
texts as expressions and makes source code of names. So a file is checked before PyTorch loads it: pickles must be of
tensors and plain values, texts must be names or plain arithmetic, and operators must be PyTorch's.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._export.verifier import Verifier
from torch.export.pt2_archive._package import PT2ArchiveReader

from tvmflow.errors import ModelError, first_line

HINT = "export the model again with torch.export; `model.trust = true` loads it as code that may do anything"
WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
LEGACY_PROGRAM = "serialized_exported_program.json"  # before torch 2.8
PROGRAM = re.compile(rf"models/.*|{re.escape(LEGACY_PROGRAM)}")
PICKLED = re.compile(r"(?:.*/)?[^/]*\.pt|serialized_(?:state_dict|constants)\.json")
CONFIG = re.compile(r"data/(?:weights|constants)/.*_config\.json")
RUNS = {
    "data/aotinductor/": "a library compiled by AOTInductor",
    "data/constants/custom_obj_": "a TorchScript object",
    "data/constants/opaque_obj_": "a pickled Python object",
}
NAME = re.compile(r"[\w.]*")
TREE_TYPES = frozenset({None, *(f"builtins.{kind}" for kind in ("tuple", "list", "dict")), "collections.OrderedDict"})
# Names of weights may have any characters that end no text; what is free is never read as code.
PLACES = frozenset({"parameter_name", "buffer_name", "tensor_constant_name", "custom_obj_name", "fqn", "path_name"})
PLACE = re.compile(r"[\w.:/ -]*")
FREE = frozenset({"metadata", "as_string", "as_strings", "torch_version"})
EXPRESSIONS = frozenset({"expr_str", "guards_code"})
TREES = frozenset({"in_spec", "out_spec"})
OPERATORS = frozenset({"target", "as_operator"})
PLAIN_OPERATOR = re.compile(
    r"torch\.sym_\w+|torch\._C\._set_grad_enabled|torch\.amp\.autocast_mode\._(?:enter|exit)_autocast"
)
USES_FILES = frozenset({"torch.ops.aten.from_file.default", "torch.ops.aten.from_file.out"})
NODES = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.Call,
    ast.keyword,
    ast.Subscript,
    ast.Attribute,
    ast.IfExp,
    ast.Tuple,
)
CALLED = re.compile(
    r"Add|Mul|Pow|Integer|Float|Rational|Symbol|Max|Min|Mod|Abs|And|Or|Not|Eq|Ne|Lt|Le|Gt|Ge|Equality|Unequality"
    r"|StrictLessThan|StrictGreaterThan|LessThan|GreaterThan|ITE|Piecewise|ExprCondPair|Tuple|floor|ceiling|sqrt"
    r"|FloorDiv|ModularIndexing|Where|PythonMod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|LShift|RShift|PowByNatural"
    r"|FloatPow|FloatTrueDiv|IntTrueDiv|IsNonOverlappingAndDenseIndicator|TruncToFloat|TruncToInt|RoundToInt"
    r"|RoundDecimal|ToFloat|Identity|size|stride|storage_offset|dim|numel|isnan|isinf|int|float|bool|round"
)


def check(path: Path) -> None:
    """Raises ModelError, naming the member, where loading a `.pt2` file would run code of its own or unpack a bomb."""
    with path.open("rb") as stream:
        names = _check_sizes(str(path), stream, path.stat().st_size)
    try:
        reader: Any = PT2ArchiveReader(str(path))
        members = dict.fromkeys(reader.get_file_names(), reader.read_bytes)
        both = LEGACY_PROGRAM in names
    except RuntimeError:
        members, both = dict.fromkeys(names, zipfile.ZipFile(path).read), False
    if both:
        raise ModelError(f"{path}: holds a program in PyTorch's older format beside one in the newer", HINT)
    for name, read in members.items():
        where = f"{path}, member {name}"
        for prefix, what in RUNS.items():
            if name.startswith(prefix):
                raise ModelError(f"{where}: {what}, which is code", HINT)
        if PROGRAM.fullmatch(name) or CONFIG.fullmatch(name):
            _check_texts(where, json.loads(read(name)))
        if CONFIG.fullmatch(name):
            for pickled in _pickled(where, name, json.loads(read(name))):
                _check_pickle(f"{path}, member {pickled}", read(pickled))
        if PICKLED.fullmatch(name):
            _check_pickle(where, read(name))


@contextmanager
def weights_only() -> Iterator[None]:
    """Within it, whatever PyTorch unpickles is tensors and plain values."""
    before = os.environ.get(WEIGHTS_ONLY)
    os.environ[WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        os.environ.pop(WEIGHTS_ONLY)
        if before is not None:
            os.environ[WEIGHTS_ONLY] = before


def _check_sizes(where: str, stream: Any, size_bytes: int) -> list[str]:
    """The members' names. PyTorch compresses nothing, so that no file unpacks to more than itself."""
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ModelError(
                f"{where}, member {member.filename}: it is compressed, to {member.compress_size:,} bytes "
                f"of {member.file_size:,}",
                "torch.export.save compresses nothing: write it again",
            )
    total = sum(member.file_size for member in members)
    if total > size_bytes:
        raise ModelError(
            f"{where}: its members claim {total:,} bytes, the file has {size_bytes:,}",
            "it is damaged or made to exhaust memory; export the model again",
        )
    return [member.filename for member in members]


def _check_pickle(where: str, data: bytes) -> None:
    if not data:
        return
    _check_sizes(where, io.BytesIO(data), len(data))
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as exc:
        reason = re.search(r"WeightsUnpickler error: (.*?)(?: was not an allowed.*)?$", str(exc), re.MULTILINE)
        raise ModelError(
            f"{where}: it is pickled and needs more than tensors and plain values: "
            f"{reason[1] if reason else first_line(exc)}",
            HINT,
        ) from None


def _pickled(where: str, config: str, body: Any) -> Iterator[str]:
    """The members that the list of weights or constants names as pickles of tensors."""
    for entry in body["config"].values():
        path = f"{config.rpartition('/')[0]}/{entry['path_name']}"
        for prefix, what in RUNS.items():
            if path.startswith(prefix):
                raise ModelError(f"{where}: names {path}, {what}, which is code", HINT)
        if entry.get("use_pickle"):
            yield path


def _check_texts(where: str, body: Any, key: str = "") -> None:
    """Raises ModelError for a text in the description of a graph that is more than its place needs."""
    if isinstance(body, dict):
        for name, value in body.items():
            _check(where, "names", name, bool(PLACE.fullmatch(name)))
            if name not in FREE:
                _check_texts(where, value, name)
    elif isinstance(body, list):
        for value in body:
            _check_texts(where, value, key)
    elif isinstance(body, str):
        _check(where, key, body, _is_plain(key, body))


def _check(where: str, key: str, text: str, plain: bool) -> None:
    if not plain:
        raise ModelError(f"{where}: `{key}` may hold no code, but is {text[:120]!r}", HINT)


def _is_plain(key: str, text: str) -> bool:
    if key in EXPRESSIONS:
        return is_arithmetic(text)
    if key in TREES:
        return _is_tree(json.loads(text)[1])
    if key in OPERATORS:
        return _is_operator(text)
    return bool((PLACE if key in PLACES else NAME).fullmatch(text))


def is_arithmetic(text: str) -> bool:
    """Whether an expression only computes with numbers, names, and the sizes of tensors."""
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    one_line = "\n" not in text and "#" not in text
    return one_line and all(isinstance(node, NODES) and _is_harmless(node) for node in nodes)


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return bool(NAME.fullmatch(node.value)) if isinstance(node.value, str) else not isinstance(node.value, bytes)
    if isinstance(node, ast.Name):
        return not node.id.startswith("__")
    if isinstance(node, ast.Attribute):
        return not node.attr.startswith("_")
    if isinstance(node, ast.Call):
        return bool(CALLED.fullmatch(getattr(node.func, "attr", getattr(node.func, "id", ""))))
    return True


def _is_tree(spec: Any) -> bool:
    """Whether a structure of arguments is made of Python's own containers with plain keys."""
    context = spec["context"]
    if spec["type"] not in TREE_TYPES or not isinstance(context, str | None):
        return False
    keys = json.loads(context) if context else None
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str | int) for key in keys)):
        return False
    named = all(PLACE.fullmatch(key) for key in keys or () if isinstance(key, str))
    return named and all(map(_is_tree, spec["children_spec"]))


def _is_operator(name: str) -> bool:
    if name.startswith("torch.ops."):
        found: Any = torch
        for part in name.split(".")[1:]:
            found = getattr(found, part, None)
        return name not in USES_FILES and isinstance(found, torch._ops.OpOverload | torch._ops.HigherOrderOperator)
    builtins = {f"{op.__module__}.{op.__name__}" for op in Verifier().allowed_builtin_ops()}
    return name in builtins or bool(PLAIN_OPERATOR.fullmatch(name))
