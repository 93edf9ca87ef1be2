"""The commands of `tvmflow db` that need TVM: `verify`, `export` and `import`. It runs in child processes alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tvmflow.cli import options
from tvmflow.cli.output import say, say_json, show_frame
from tvmflow.errors import DatabaseError

if TYPE_CHECKING:
    from tvmflow.database import Fault
    from tvmflow.database.metaschedule import Stated

FOLDER = click.Path(path_type=Path, file_okay=False)
database = click.option(
    "--database", type=FOLDER, default=Path("tuning_db"), show_default=True, help="The tuning database's folder."
)


@click.command()
@database
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Check the database that this config names, if it names one.",
)
@click.option("--no-replay", is_flag=True, help="Only read the files: no trace is applied, TVM is not loaded.")
@options.as_json
@options.debug
def verify(database: Path, config_file: Path | None, no_replay: bool, as_json: bool, debug: bool) -> None:
    """Read everything, replay every trace, and report every fault with its place and what to do; exit code 15 if one
    costs a record.

    A line is faulty when it is no JSON, has another format version, an unknown or missing field, a key that does not
    fit its parts, a timing that is no positive number, or a size beyond all reason. A record is faulty when its
    workload does not load or is not that of its key, or when its trace does not apply to it. Replaying happens in
    processes of its own, runs no kernel and takes about 15 ms a record. Files that are merely not in order (after a
    merge without the merge driver) are named and do not fail.
    """
    from tvmflow import config
    from tvmflow.database import Store
    from tvmflow.exchange import conversion

    if config_file is not None:
        database = config.load(config_file).tuning.database or database
    store = Store(database)
    faults = store.verify(None if no_replay else conversion.replay)
    if as_json:
        say_json([asdict(fault) | {"path": str(fault.path)} for fault in faults])
    elif not faults:
        reading = store.read()
        counts = {"records": len(reading.records), "comparisons": len(reading.comparisons)}
        found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        say(f"{database}: {f'{found}, no faults' if found else 'no records'}")
    fail_on(faults)


@click.command(name="export")
@click.argument("folder", type=FOLDER)
@database
@click.option("--key", "keys", multiple=True, metavar="PREFIX", help="Records whose key starts so; may be repeated.")
@click.option("--target", metavar="PATTERN", help="Records whose target folder matches, e.g. 'llvm-x86-64-v3-*'.")
@options.as_json
@options.debug
def export_records(
    folder: Path, database: Path, keys: tuple[str, ...], target: str | None, as_json: bool, debug: bool
) -> None:
    """Write records into FOLDER as MetaSchedule's own two files, for TVM's JSONDatabase and MetaScheduleApplyDatabase.

    All records, or those that meet the conditions given. Those files do not tell targets or numerics modes apart, so
    that all must be of one. What MetaSchedule has no place for is lost: the key, versions, machine, date, seed.
    """
    from tvmflow.database import Store
    from tvmflow.database.selection import select
    from tvmflow.exchange import conversion

    chosen = select(keys, target=target) if keys or target else lambda record: True
    count, faults = conversion.export_files(Store(database), folder, chosen)
    if as_json:
        say_json({"records": count})
    else:
        say(f"{folder}: {count} records")
    fail_on(faults)


@click.command(name="import")
@click.argument("folder", type=FOLDER)
@database
@click.option("--fast-math/--no-fast-math", required=True, help="Whether fast math was allowed.")
@click.option("--tf32/--no-tf32", required=True, help="Whether TF32 was allowed.")
@click.option("--tvm", required=True, metavar="VERSION", help="The TVM that tuned them, or unknown.")
@click.option("--cpu", required=True, metavar="NAME", help="The CPU that measured them, or unknown.")
@click.option("--date", required=True, type=click.DateTime(["%Y-%m-%d"]), metavar="YYYY-MM-DD", help="When, in UTC.")
@click.option("--mcpu", metavar="NAME", help="LLVM's name of the CPU, where records do not say it.")
@click.option("--mtriple", metavar="TRIPLE", help="LLVM's target triple, where records do not say it.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads, where records do not say num-cores.")
@options.as_json
@options.debug
def import_records(folder: Path, database: Path, as_json: bool, debug: bool, **stated: Any) -> None:
    """Take records from MetaSchedule's own two files in FOLDER: of each workload and target the fastest.

    Those files hold neither numerics nor versions, machine or date: state them. The target is read from each record;
    --mcpu, --mtriple and --threads are for what it leaves open, and a record that says otherwise is refused. Workloads
    get the names that keys are made of, and traces those of their blocks. Lines that cannot be used are named, and the
    exit code is 15 then; the others are taken all the same.
    """
    from tvmflow.database import Store, tables
    from tvmflow.exchange import conversion

    result = conversion.import_files(Store(database), folder, _stated(**stated))
    show_frame(tables.records(result.records), as_json)
    if not as_json:
        say(
            f"{database}: {result.taken} of {len(result.records)} records were new or better; {folder}: "
            f"{result.unmeasured} candidates could not be measured"
        )
    fail_on(result.faults)


def warn(faults: Iterable[Fault]) -> None:
    """Names faults and what to do on standard error."""
    for fault in faults:
        say(str(fault), err=True, label=("skipped" if fault.skipped else "untidy", "yellow"))
        say(f"  next: {fault.fix}", err=True)


def fail_on(faults: Iterable[Fault]) -> None:
    """Names every fault; raises DatabaseError if one of them costs a line."""
    warn(faults)
    lost = [fault for fault in faults if fault.skipped]
    if lost:
        raise DatabaseError(f"faulty lines and files that cost records: {len(lost)}", lost[0].fix)


def _stated(fast_math: bool, tf32: bool, tvm: str, cpu: str, date: datetime, **target: Any) -> Stated:
    from importlib.metadata import version

    from tvmflow.database import Provenance
    from tvmflow.database.metaschedule import Stated

    provenance = Provenance(
        versions={"apache-tvm": tvm},
        machine="unknown",
        cpu=cpu,
        threads=1,
        date=f"{date:%Y-%m-%dT%H:%M:%SZ}",
        seed=None,
        trials=0,
        protocol="imported",
        tvmflow=version("tvmflow"),
    )
    return Stated({"fast_math": fast_math, "tf32": tf32}, provenance=provenance, **target)
