"""Signatures of artifacts, with SSH keys: OpenSSH's ssh-keygen makes and checks them (PROTOCOL.sshsig).

What is signed is manifest.json, which holds the hashes of all other files. The signature is a file of its own beside
the artifact, `NAME.tvmflow.sig`, so that neither the artifact nor its hashes change. No TVM in here.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tvmflow import artifact
from tvmflow.errors import ArtifactError, InputError, OutputError, SetupError

NAMESPACE = "tvmflow-artifact"  # a signature made for anything else is not one of an artifact


def signature_of(path: Path) -> Path:
    """Where the signature of an artifact is."""
    return path.parent / f"{path.name}.sig"


def sign(path: Path, key: Path) -> Path:
    """Signs an artifact whose files are what its manifest says; returns where the signature was written.

    `key` is a private key, or a public one whose private key an agent holds. Raises ArtifactError, InputError,
    OutputError.
    """
    with artifact.opened_any(path) as (folder, _):  # which checks all hashes: what is damaged is not signed
        text = _manifest_text(folder)
    if not key.is_file():
        raise InputError(f"{key}: no such key", "`ssh-keygen -t ed25519` makes one")
    done = _ssh_keygen("-Y", "sign", "-f", str(key), "-n", NAMESPACE, text=text)
    if done.returncode:
        raise InputError(f"{key}: cannot sign with it: {done.stderr.strip()[:200]}", "give a private key of OpenSSH")
    target = signature_of(path)
    try:
        target.write_text(done.stdout, encoding="ascii")
    except OSError as exc:
        raise OutputError(
            f"{target}: cannot be written: {exc.strerror}", "sign it where its folder can be written"
        ) from None
    return target


def check(path: Path, signers: Path) -> str:
    """Who of an allowed_signers file signed an artifact; raises ArtifactError where nobody did, or a file differs.

    Nothing of the artifact is loaded. `signers` has one line per key: principals, key type, key (ssh-keygen(1)).
    """
    signature = signature_of(path)
    if not signers.is_file():
        raise InputError(f"{signers}: no such file of allowed signers", "one line per key: NAME ssh-ed25519 AAAA...")
    if not signature.is_file():
        raise ArtifactError(f"{path}: not signed: there is no {signature.name} beside it", "`tvmflow sign` signs it")
    with artifact.opened_any(path) as (folder, _):  # which checks all hashes
        text = _manifest_text(folder)
    found = _ssh_keygen("-Y", "find-principals", "-s", str(signature), "-f", str(signers))
    for principal in found.stdout.splitlines() if not found.returncode else ():
        done = _ssh_keygen(
            "-Y", "verify", "-f", str(signers), "-I", principal, "-n", NAMESPACE, "-s", str(signature), text=text
        )
        if not done.returncode:
            return principal
    raise ArtifactError(
        f"{path}: {signature.name} is not a signature of this artifact by a key in {signers}",
        "do not run it; get it again from who made it",
    )


def _manifest_text(folder: Path) -> str:
    return (folder / artifact.MANIFEST).read_text(encoding="utf-8")


def _ssh_keygen(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    tool = shutil.which("ssh-keygen")
    if tool is None:
        raise SetupError("signatures need ssh-keygen, which is not installed", "e.g. apt-get install openssh-client")
    return subprocess.run([tool, *arguments], input=text, capture_output=True, text=True, check=False)
