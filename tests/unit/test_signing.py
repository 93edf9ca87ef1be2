"""Signatures say who made an artifact, and are right only for every byte of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_artifact

from tvmflow import artifact, signing
from tvmflow.artifact import CONSTANTS, LIBRARY, MANIFEST
from tvmflow.errors import ArtifactError, InputError

made = test_artifact.made
pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two keys, and a file that allows the first of them."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("alice", "mallory"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
        subprocess.run(command, check=True)
    (folder / "allowed").write_text(f"alice@example.org {(folder / 'alice.pub').read_text()}")
    return folder


def test_a_signature_names_who_signed(made: Path, keys: Path) -> None:
    before = made.read_bytes() if made.is_file() else (made / MANIFEST).read_bytes()
    assert signing.sign(made, keys / "alice") == made.parent / "m.tvmflow.sig"
    assert signing.check(made, keys / "allowed") == "alice@example.org"
    assert before == (made.read_bytes() if made.is_file() else (made / MANIFEST).read_bytes())


def test_the_key_of_another_is_refused(made: Path, keys: Path) -> None:
    signing.sign(made, keys / "mallory")
    with pytest.raises(ArtifactError, match=r"m\.tvmflow\.sig is not a signature of this artifact by a key in"):
        signing.check(made, keys / "allowed")


def test_a_signature_for_another_purpose_is_refused(made: Path, keys: Path) -> None:
    with artifact.opened_any(made) as (folder, _):
        text = (folder / artifact.MANIFEST).read_text()
    command = ["ssh-keygen", "-Y", "sign", "-f", str(keys / "alice"), "-n", "file"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    signing.signature_of(made).write_text(done.stdout)
    with pytest.raises(ArtifactError, match="is not a signature of this artifact"):
        signing.check(made, keys / "allowed")


def test_another_artifact_is_refused_with_hashes_that_are_right(made: Path, keys: Path) -> None:
    signing.sign(made, keys / "alice")
    with artifact.staging(made, made.is_file()) as folder:
        test_artifact.write(folder, machine="other")
    with pytest.raises(ArtifactError, match="is not a signature of this artifact"):
        signing.check(made, keys / "allowed")


@pytest.mark.parametrize("name", [LIBRARY, CONSTANTS])
def test_every_file_must_be_what_was_signed(tmp_path: Path, keys: Path, name: str) -> None:
    with artifact.staging(tmp_path / "m.tvmflow", False) as folder:
        test_artifact.write(folder)
    signing.sign(tmp_path / "m.tvmflow", keys / "alice")
    (tmp_path / "m.tvmflow" / name).write_bytes(b"changed")
    with pytest.raises(ArtifactError, match="changed or damaged since it was built"):
        signing.check(tmp_path / "m.tvmflow", keys / "allowed")
    with pytest.raises(ArtifactError, match="changed or damaged since it was built"):
        signing.sign(tmp_path / "m.tvmflow", keys / "alice")


def test_what_is_missing_is_named(made: Path, keys: Path) -> None:
    with pytest.raises(ArtifactError, match=r"not signed: there is no m\.tvmflow\.sig beside it"):
        signing.check(made, keys / "allowed")
    with pytest.raises(InputError, match=r"nobody: no such file of allowed signers"):
        signing.check(made, keys / "nobody")
    with pytest.raises(InputError, match=r"nobody: no such key"):
        signing.sign(made, keys / "nobody")
    with pytest.raises(InputError, match=r"allowed: cannot sign with it: "):
        signing.sign(made, keys / "allowed")


def test_the_commands(made: Path, keys: Path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tvmflow.cli", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    checked = ("verify", made, "--signed-by", keys / "allowed", "--no-run")
    assert run("sign", made, "--key", keys / "alice").stdout == f"wrote {made}.sig\n"
    good = run(*checked)
    assert (good.returncode, good.stderr) == (0, "signed by alice@example.org\n")
    signing.sign(made, keys / "mallory")
    bad = run(*checked[:-1])
    assert bad.returncode == 9
    assert "is not a signature of this artifact by a key in" in bad.stderr
    assert run("verify", made, "--no-run").returncode == 2
