"""Tunes the headline models into tuning_db/ for every AVX-512 CPU: half an hour alone on a machine.

    python scripts/tune_headline.py [--threads 2] [--share 1.0] [MODEL ...]      # default: all; needs `make models`

One session per model, so that a small model's tasks need not compete with a large one's. Sessions go on where they
stopped: run it again for more. `--share` is that of the usual minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MINUTES = {
    "effnet_lite0": 4,
    "ppocr_rec": 4,
    "ppocr_det": 4,
    "resnet50": 3,
    "basic_pitch": 3,
    "minilm_l6": 2,
    "magika": 1,
    "crepe_tiny": 1,
    "silero_ifless": 2,
    "smollm2_135m": 2,
    "realesr_fp32": 1,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--share", type=float, default=1.0)
    arguments = parser.parse_args()
    unknown = [model for model in arguments.models if model not in MINUTES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(MINUTES)}")
    settings = ["target.mcpu=x86-64-v4", f"target.threads={arguments.threads}", f"tuning.database={ROOT / 'tuning_db'}"]
    for model in arguments.models or MINUTES:
        words = [word for setting in settings for word in ("--set", setting)]
        subprocess.run(
            [
                sys.executable,
                "-m",
                "tvmflow.cli",
                "tune",
                ROOT / "configs" / f"{model}.toml",
                *words,
                "--minutes",
                str(MINUTES[model] * arguments.share),
                "--trials-per-task",
                "192",
            ],
            check=True,
        )


if __name__ == "__main__":
    main()
