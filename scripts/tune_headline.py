"""Tunes the headline models into tuning_db/ for every AVX-512 CPU, on two threads: 40 minutes alone on a machine.

    python scripts/tune_headline.py [MODEL ...]      # default: all; needs `make models`

One session per model, so that a small model's tasks need not compete with a large one's. Sessions go on where they
stopped: run it again for more.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MINUTES = {
    "effnet_lite0": 4, "ppocr_rec": 4, "ppocr_det": 4, "resnet50": 3, "basic_pitch": 3, "minilm_l6": 2, "magika": 1,
    "crepe_tiny": 1, "silero_ifless": 2, "smollm2_135m": 2, "realesr_fp32": 1,
}  # fmt: skip
SETTINGS = ("target.mcpu=x86-64-v4", "target.threads=2", f"tuning.database={ROOT / 'tuning_db'}")


def main() -> None:
    for model in sys.argv[1:] or MINUTES:
        settings = [word for setting in SETTINGS for word in ("--set", setting)]
        subprocess.run([sys.executable, "-m", "tvmflow.cli", "tune", ROOT / "configs" / f"{model}.toml", *settings,
                        "--minutes", str(MINUTES[model]), "--trials-per-task", "192"], check=True)  # fmt: skip


if __name__ == "__main__":
    main()
