"""What records of other sizes are worth: trials until 95 % of the final speed, with a start from them and without.

    python benchmarks/transfer.py [TRIALS] [TASKS]      # default 128 trials of each of 8 tasks

PP-OCR text recognition for lines of 480 pixels, none of whose products is in the committed database: that was tuned
for 320. The costliest tasks are tuned twice from the same seed, in sessions of their own. Two threads. The final speed
of a task is the best that either session found.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import tvm

from tvmflow import config
from tvmflow.database import Record, Store
from tvmflow.tasks import Task
from tvmflow.tuning import child
from tvmflow.tuning.measure import Measurer
from tvmflow.tuning.session import Limits, Session

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {"target": {"mcpu": "x86-64-v4", "threads": 2}, "model": {"inputs": {"x": {"shape": [1, 3, 48, 480]}}}}
NEAR = 0.95


def curve(
    task: Task, records: list[Record], trials: int, measurer: Measurer, target: tvm.target.Target
) -> list[tuple[int, float]]:
    """(trials, best GFLOP/s) after the start and after every round."""
    found: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        limits = Limits(trials, 600, 0)
        store = Store(Path(folder))
        session = Session(target, limits, measurer, store, lambda p: found.append((p.trials, p.best_gflops)))
        session.tune([task], {record.key: record for record in records})
    return found


def until(found: list[tuple[int, float]], goal: float) -> int | None:
    return next((trials for trials, speed in found if speed >= goal), None)


def main() -> None:
    trials, count = (int(text) for text in [*sys.argv[1:], *["128", "8"][len(sys.argv) - 1 :]])
    cfg = config.load(ROOT / "configs" / "ppocr_rec.toml", [SETTINGS])
    tasks, setting = child.extracted(cfg)
    records = list(Store(ROOT / "tuning_db").read().by_key.values())
    new = [task for task in tasks if task.key not in {record.key for record in records}][:count]
    target = setting.tvm_target
    print("| task | default GFLOP/s | start with records | best without | best with | trials to 95 % without | with |")
    print("|---|---|---|---|---|---|---|", flush=True)
    needed: list[list[int]] = []
    with Measurer(str(target), 2, 2) as measurer:
        for task in new:
            without, with_ = (curve(task, known, trials, measurer, target) for known in ([], records))
            goal = NEAR * max(speed for _, speed in [*without, *with_])
            reached = [until(found, goal) for found in (without, with_)]
            needed.append([trials if r is None else r for r in reached])
            best = [max(speed for _, speed in found) for found in (without, with_)]
            shown = ["never" if r is None else str(r) for r in reached]
            print(
                f"| {task.name[:40]} | {without[0][1]:.0f} | {with_[0][1]:.0f} | {best[0]:.0f} | {best[1]:.0f} "
                f"| {shown[0]} | {shown[1]} |",
                flush=True,
            )
    sums = [sum(pair[side] for pair in needed) for side in (0, 1)]
    print(f"\n{sums[0]} trials without, {sums[1]} with")


if __name__ == "__main__":
    main()
