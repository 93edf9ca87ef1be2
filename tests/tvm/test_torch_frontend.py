"""PyTorch modules compiled as they come out of `load`, held against eager PyTorch; and what is refused.

Everything runs in processes of their own, several modules in each, as importing PyTorch and TVM takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tvmflow.errors import SetupError
from tvmflow.process import Child

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")

HERE = Path(__file__).parent
SOURCE = (HERE / "torch_runs.py").read_text(encoding="utf-8")


CHILD = Child("running PyTorch", env={"PYTHONPATH": f"{HERE.parents[1]}:{HERE}"}, torch=True)


def all_of(kind: str, names: list[str], folder: str = "") -> dict[str, Any]:
    """For a child."""
    import torch_runs

    return torch_runs.all_of(kind, names, folder)


def save_program(path: str) -> None:
    """For a child."""
    import torch_runs

    torch_runs.save_program(path)


def names_of(table: str) -> list[str]:
    """The keys of a table in torch_runs, read without importing PyTorch."""
    body = re.search(rf"^{table}: .*? = \{{$(.*?)^\}}", SOURCE, re.MULTILINE | re.DOTALL)
    assert body is not None
    return re.findall(r'^    "([^"]+)": ', body.group(1), re.MULTILINE)


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    return CHILD.call(all_of, "values", names_of("VALUES"))


@pytest.fixture(scope="module")
def dynamic() -> dict[str, Any]:
    return CHILD.call(all_of, "dynamic", names_of("DYNAMIC"))


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    return CHILD.call(all_of, "refused", names_of("REFUSED"))


def test_random_weights_are_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ndef entry():\n    return torch.nn.Linear(3, 2).eval(), (torch.ones(1, 3),)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tvmflow.cli", "compile", "mine:entry", "-o", "a"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", names_of("VALUES"))
def test_values_are_those_of_eager_pytorch(values: dict[str, Any], name: str) -> None:
    assert values[name] is None, values[name]


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("sizes as numbers", [("b", "t")]),
        ("expand and slice", [(2, "x_dim1")]),
        ("image", [("b", 3, "h", "w")]),
        ("attention", [(1, 2, "t", 8)]),
        ("last token", [("b", "t", 2), ("b",)]),
    ],
)
def test_dynamic_dimensions_keep_their_names_and_serve_other_sizes(
    dynamic: dict[str, Any], name: str, shapes: list[tuple[int | str, ...]]
) -> None:
    assert dynamic[name] == shapes


MESSAGES = {
    "training": r"UnsupportedError: entry: 3 things .*training mode and updates its statistics: call \.eval\(\).*"
    r"native_dropout.*call \.eval\(\)",
    "random": r"aten\.randn\.default \(node `randn`.*random operator",
    "several": r"3 things.*lgamma.*no converter.*erfinv.*no converter.*rand\.default.*random",
    "sized by values": r"aten\.index\.Tensor.*torch_runs\.py:\d+ `.*x\[x > 0\].*size depends on values",
    "complex": "complex numbers",
    "buffer": "writes to its buffer `cache`",
    "input": "writes into its input `x`",
    "positions": "positions of a maximum pool",
    "bfloat16 edge": "output .* is bfloat16.*cast to float32",
    "no tensor": "returns no tensor",
    "halves": r"aten\.add\.Tensor.*TVM cannot tell that the sizes of its operands agree",
    "item": r"_local_scalar_dense.*leave out \.item\(\)",
    "control flow": r"ModelError: entry: torch\.export failed: .*data-dependent.* \| .*control flow",
    "two names": "ModelError: entry: `a` and `b` must be equal.*give both dimensions one name",
    "fixed by the code": r"ModelError: .*specialized it to be a constant \(10\)",
    "own library": r"tvmflow_test\.relu\.default.*a library of its own",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_cannot_be_compiled_is_refused_with_place_and_reason(refused: dict[str, str], name: str) -> None:
    assert re.search(MESSAGES[name], refused[name], re.DOTALL), refused[name]


def test_every_refusal_has_its_message() -> None:
    assert set(MESSAGES) == set(names_of("REFUSED"))


MODULE = """
import torch
class Scores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
    def forward(self, x, pair, times=2, mask=None):
        y = self.linear(x) * times
        return {"logits": y, "parts": [y.softmax(-1), None, pair["a"] + pair["b"]], "count": 5}
def good():
    pair = {"a": torch.ones(2), "b": torch.ones(2)}
    return Scores(), (torch.ones(2, 4), pair, 3, None), ({0: "batch"}, None, None, None)
class Lengths(torch.nn.Module):
    def forward(self, x):
        return x[:, ::4], torch.cat([x, x], 0), x[:, 1:]
def lengths(): return Lengths(), (torch.ones(3, 10),), ({0: "batch", 1: "time"},)
def fails():
    values = {}
    return values["missing"]
def one(): return Scores()
def number(): return 3, (torch.ones(2),)
def misfit(): return Scores(), ()
"""


BAD_ENTRIES = {
    "user_nowhere:f": "ModelError: user_nowhere:f: there is no module `user_nowhere` in ",
    "user_broken:f": r"ZeroDivisionError: division by zero \(at .*user_broken\.py:2: \"x = 1 / 0\"\)",
    "user_model:nothing": "has no function `nothing`",
    "user_model:fails": r"KeyError: 'missing' \(at .*user_model\.py:19: \"return values",
    "user_model:one": "returned Scores, not a tuple",
    "user_model:number": "the first value is a int, not a torch.nn.Module",
    "user_model:misfit": "do not fit Scores.forward: missing a required argument: 'x'",
    "user_model:good?bach=3": "ConfigError: .*no dimension `bach` .* its dimensions are: batch",
    "empty.pt2": r"ModelError: empty\.pt2: not a readable torch\.export program",
    "junk.pt2": r"ModelError: junk\.pt2: not a readable torch\.export program",
    "half.pt2": r"ModelError: half\.pt2: not a readable torch\.export program",
}
GOOD_ENTRIES = {
    "user_model:good": (
        {"x": ("batch", 4), "pair_a": (2,), "pair_b": (2,)},
        {"logits": ("batch", 3), "parts_0": ("batch", 3), "parts_2": (2,)},
    ),
    "user_model:good?batch=5": (
        {"x": (5, 4), "pair_a": (2,), "pair_b": (2,)},
        {"logits": (5, 3), "parts_0": (5, 3), "parts_2": (2,)},
    ),
    "user_model:lengths": (
        {"x": ("batch", "time")},
        {
            "output_0": ("batch", "((time + 3) // 4)"),
            "output_1": ("(batch * 2)", "time"),
            "output_2": ("batch", "(time - 1)"),
        },
    ),
    "saved.pt2": ({"input": ("input_dim0", 3, 4)}, {"output": ("input_dim0", 8)}),
    "saved.pt2?input_dim0=5": ({"input": (5, 3, 4)}, {"output": (5, 8)}),
}


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("entries")
    (folder / "user_model.py").write_text(MODULE)
    (folder / "user_broken.py").write_text("import torch\nx = 1 / 0\n")
    CHILD.call(save_program, str(folder / "saved.pt2"))
    program = (folder / "saved.pt2").read_bytes()
    for name, content in (("empty", b""), ("junk", b"junk"), ("half", program[: len(program) // 2])):
        (folder / f"{name}.pt2").write_bytes(content)
    return CHILD.call(all_of, "entry", [*BAD_ENTRIES, *GOOD_ENTRIES], str(folder))


@pytest.mark.parametrize("name", GOOD_ENTRIES)
def test_names_are_those_of_parameters_and_results(entries: dict[str, Any], name: str) -> None:
    signature = entries[name]
    assert not isinstance(signature, str), signature
    inputs, outputs = ({spec.name: spec.shape for spec in specs} for specs in (signature.inputs, signature.outputs))
    assert (inputs, outputs) == GOOD_ENTRIES[name]


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_a_bad_entry_or_program_says_what_and_where(entries: dict[str, Any], name: str) -> None:
    assert re.search(BAD_ENTRIES[name], str(entries[name])), entries[name]


def test_without_pytorch_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("tvmflow.frontend.torch")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SetupError, match="needs PyTorch, which is not installed") as caught:
        importlib.import_module("tvmflow.frontend.torch")
    assert caught.value.hint == 'pip install "tvmflow[torch]"'
