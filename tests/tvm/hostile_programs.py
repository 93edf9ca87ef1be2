"""`.pt2` files that run something when PyTorch loads them: each is to create a file. Runs in a process of its own."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tvmflow.errors import TvmflowError
from tvmflow.frontend.torch import source

PROGRAM = "m/models/model.json"
WEIGHTS = "m/data/weights/model_weights_config.json"
CONSTANTS = "m/data/constants/model_constants_config.json"
ENUM = json.dumps(["o", {"__enum__": True, "fqn": "this:d", "name": "p"}])  # imports a module
Members = dict[str, bytes]


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


class Small(torch.nn.Module):
    """Sizes that stay open, a branch on them, several inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 8)

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        joined = torch.cat([x, more["a"]])
        if x.shape[0] > 4:
            joined = joined * 2
        return {"o": self.linear(joined), "p": joined.reshape(-1, joined.shape[0])}


def saved(obj: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(obj, stream)
    return stream.getvalue()


def changed(member: str, change: Callable[[Any], None]) -> Callable[[Members, str], None]:
    """Changes the JSON of a member."""

    def apply(members: Members, marker: str) -> None:
        body = json.loads(members[member])
        change(body)
        members[member] = json.dumps(body).replace("MARKER", marker).encode()

    return apply


def call(marker: str = "MARKER") -> str:
    return f"__import__('pathlib').Path('{marker}').touch()"


def set_size(body: Any) -> None:
    sizes = [value["sizes"] for value in body["graph_module"]["graph"]["tensor_values"].values() if value["sizes"]]
    next(s for one in sizes for s in one if "as_expr" in s)["as_expr"]["expr_str"] = call()


def set_tree(kind: str, context: Any) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        signature = body["graph_module"]["module_call_graph"][0]["signature"]
        tree = json.loads(signature["out_spec"])
        tree[1] |= {"type": kind, "context": context}
        signature["out_spec"] = json.dumps(tree)

    return change


def node(body: Any) -> Any:
    return body["graph_module"]["graph"]["nodes"][-1]


def pickled_weight(members: Members, marker: str) -> None:
    body = json.loads(members[WEIGHTS])
    entry = next(iter(body["config"].values()))
    entry["use_pickle"] = True
    members[WEIGHTS] = json.dumps(body).encode()
    members[f"m/data/weights/{entry['path_name']}"] = saved(Payload(marker))


def pickled_constant(members: Members, marker: str) -> None:
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    members[CONSTANTS] = json.dumps({"config": {"c": entry}}).encode()
    members["m/data/constants/opaque_obj_0"] = pickle.dumps(Payload(marker))


def older_format_beside(members: Members, marker: str) -> None:
    members["version"] = b"8.14"
    members |= dict.fromkeys(("serialized_exported_program.json",), members[PROGRAM])
    members |= dict.fromkeys(("serialized_state_dict.pt", "serialized_constants.pt"), saved({}))
    members["serialized_example_inputs.pt"] = saved(Payload(marker))
    members["m/archive_version"] = b"x"


def only_older_format(members: Members, marker: str) -> None:
    older_format_beside(members, marker)
    for name in [name for name in members if name.startswith("m/")]:
        del members[name]


VARIANTS: dict[str, Callable[[Members, str], None]] = {
    "pickled inputs": lambda members, marker: members.update({"m/data/sample_inputs/model.pt": saved(Payload(marker))}),
    "pickled weight": pickled_weight,
    "pickled constant": pickled_constant,
    "older format": only_older_format,
    "both formats": older_format_beside,
    "compiled library": lambda members, _: members.update({"m/data/aotinductor/model/a.so": b"\x7fELF"}),
    "size": changed(PROGRAM, set_size),
    "guard": changed(PROGRAM, lambda body: body.update(guards_code=[f"{call()} is None"])),
    "guard's text": changed(PROGRAM, lambda body: body.update(guards_code=[f'1 == 1, "{{" or {call()}'])),
    "node's name": changed(PROGRAM, lambda body: node(body).update(name=f"a = {call()}; b")),
    "argument's name": changed(PROGRAM, lambda body: node(body)["inputs"][0].update(name=f"a={call()}, b", kind=2)),
    "operator": changed(PROGRAM, lambda body: node(body).update(target="_operator.methodcaller")),
    "loads a library": changed(PROGRAM, lambda body: node(body).update(target="torch.ops.load_library")),
    "function of torch": changed(PROGRAM, lambda body: node(body).update(target="torch.serialization.os.system")),
    "structure": changed(
        PROGRAM,
        set_tree(
            "collections.defaultdict",
            {"default_factory_module": "antigravity", "default_factory_name": "webbrowser", "dict_context": ["o", "p"]},
        ),
    ),
    "enum": changed(PROGRAM, set_tree("builtins.dict", ENUM)),
}


def write(path: Path, members: Members, compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def load(path: Path, trusted: bool = False) -> str:
    """What loading and running a program says; "" where it works."""
    try:
        loaded = source.load_program(path, trusted)
        source.run_eager(loaded, [source.example_inputs(loaded)])
    except TvmflowError as exc:
        return f"{type(exc).__name__}: {exc.message}"
    return ""


def original(folder: Path) -> Members:
    example = (torch.rand(8, 4), {"a": torch.rand(8, 4)})
    dynamic = torch.export.Dim.DYNAMIC
    program = torch.export.export(Small(), example, dynamic_shapes={"x": {0: dynamic}, "more": {"a": {0: dynamic}}})
    torch.export.save(program, folder / "m.pt2", extra_files={"note.txt": "of the author's"})
    with zipfile.ZipFile(folder / "m.pt2") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def load_all(folder: Path, trusted: bool = False) -> dict[str, tuple[str, bool]]:
    """By variant, what is said and whether something ran; "clean" is a program as PyTorch wrote it."""
    members = original(folder)
    said = {"clean": (load(folder / "m.pt2"), False)}
    write(folder / "compressed.pt2", members, zipfile.ZIP_DEFLATED)
    said["compressed"] = (load(folder / "compressed.pt2"), False)
    for variant, plant in VARIANTS.items():
        file, marker = folder / f"{variant.replace(' ', '_')}.pt2", folder / f"ran {variant}".replace("'", "")
        hostile = dict(members)
        plant(hostile, str(marker))
        write(file, hostile)
        said[variant] = (load(file, trusted), marker.exists())
    return said
