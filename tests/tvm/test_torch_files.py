"""`.pt2` files of others: what would run something when it is loaded is refused, and nothing runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvmflow import process
from tvmflow.process import Child

pytest.importorskip("torch", reason="PyTorch is not installed")
RUNS_ONLY_IF_TRUSTED = {"pickled inputs", "pickled weight", "pickled constant", "older format", "size", "guard"}
SAID = {
    "compressed": "it is compressed, to 133 bytes of 128",
    "pickled inputs": "data/sample_inputs/model.pt: it is pickled and needs more than tensors and plain values: "
    "Unsupported global: GLOBAL getattr",
    "pickled weight": "member data/weights/weight_0: it is pickled and needs more",
    "pickled constant": "names data/constants/opaque_obj_0, a pickled Python object, which is code",
    "older format": "member serialized_example_inputs.pt: it is pickled and needs more",
    "both formats": "member serialized_example_inputs.pt: it is pickled and needs more",
    "compiled library": "data/aotinductor/model/a.so: a library compiled by AOTInductor, which is code",
    "size": "models/model.json: `expr_str` may hold no code, but is \"__import__('pathlib')",
    "guard": "`guards_code` may hold no code",
    "guard's text": "`guards_code` may hold no code",
    "node's name": "`name` may hold no code",
    "argument's name": "`name` may hold no code",
    "operator": "`target` may hold no code, but is '_operator.methodcaller'",
    "loads a library": "`target` may hold no code, but is 'torch.ops.load_library'",
    "function of torch": "`target` may hold no code, but is 'torch.serialization.os.system'",
    "structure": "`out_spec` may hold no code",
    "enum": "`out_spec` may hold no code",
}
Said = dict[str, tuple[str, bool]]


def load_all(folder: Path, trusted: bool) -> Said:
    paths = {"PYTHONPATH": f"{process.PACKAGE_PARENT}:{Path(__file__).parent}"}
    return Child("loading", env=paths, torch=True).call(loaded_in_this_process, folder, trusted)


def loaded_in_this_process(folder: Path, trusted: bool) -> Said:
    import hostile_programs

    return hostile_programs.load_all(folder, trusted)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Said:
    return load_all(tmp_path_factory.mktemp("programs"), False)


def test_a_program_as_pytorch_wrote_it_is_loaded(loaded: Said) -> None:
    assert loaded["clean"] == ("", False)


@pytest.mark.parametrize("variant", SAID)
def test_what_would_run_is_refused_by_name(loaded: Said, variant: str) -> None:
    message, ran = loaded[variant]
    assert not ran
    assert message.startswith("ModelError: ")
    assert SAID[variant] in message


def test_a_trusted_file_may_run_what_it_holds(tmp_path: Path) -> None:
    """Which also shows that these files do run something where nobody looks at them first."""
    said = load_all(tmp_path, True)
    assert {variant for variant, (_, ran) in said.items() if ran} == RUNS_ONLY_IF_TRUSTED
