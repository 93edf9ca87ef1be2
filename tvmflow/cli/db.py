"""`tvmflow db`: what people, git and CI do with a tuning database. The stages use `tvmflow.database` itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tvmflow.cli import exchange, options
from tvmflow.cli.exchange import FOLDER, database, fail_on, warn
from tvmflow.cli.output import say, say_json, show_frame, show_pairs
from tvmflow.errors import DatabaseError, UsageError

if TYPE_CHECKING:
    from tvmflow.database import Comparison, Fault, KeyParts, Record


@click.group()
def db() -> None:
    """Look into, check, merge and tidy tuning databases.

    A database is a folder of text files for git: one folder per target and numerics mode, in it one line per
    workload with the best schedule known. Its key is a hash of named parts: workload, target, numerics, preparation.

    \b
      tvmflow db stats                        what is in ./tuning_db
      tvmflow db verify                       every fault, with its place; for CI
      tvmflow db merge tuning_db shard1 shard2
      tvmflow db install-merge-driver         once per clone; git then merges records by key
    """


db.add_command(exchange.verify)
db.add_command(exchange.export_records)
db.add_command(exchange.import_records)


@db.command()
@database
@options.as_json
@options.debug
def stats(database: Path, as_json: bool, debug: bool) -> None:
    """Show per target: records, median speed, size, and the versions and days they come from.

    Speed is GFLOP/s of each record's median time; the column is the median over the records. Quarantined are the
    candidates that killed the process that measured them, and are not tried again. Faulty lines are named on standard
    error; `tvmflow db verify` makes them an exit code.
    """
    from tvmflow.database import Store, tables

    reading, accused = Store(database).read(), Store(database).accused()
    show_frame(tables.stats(reading.records, accused.quarantined), as_json)
    warn((*reading.faults, *accused.faults))


@db.command()
@click.argument("key", default="")
@database
@options.as_json
@options.debug
def show(key: str, database: Path, as_json: bool, debug: bool) -> None:
    """Show the record of KEY, or list all whose key starts with KEY; without KEY, all.

    With --json one record is printed whole, its trace and the workload's JSON text included.
    """
    from tvmflow.database import Store, tables, unpack

    reading = Store(database).read()
    found = [record for record in reading.records if record.key.startswith(key)]
    if key and not found:
        raise _no_such(key, database)
    if len(found) != 1 or not key:
        show_frame(tables.records(found), as_json)
    elif as_json:
        whole = {"key": found[0].key, **found[0].model_dump(mode="json")}
        say_json(whole | {"workload_json": unpack(found[0].workload_json)})
    else:
        show_pairs(_described(found[0]))
    warn(reading.faults)


@db.command()
@database
@options.as_json
@options.debug
def comparisons(database: Path, as_json: bool, debug: bool) -> None:
    """List the convolutions whose methods were compared: the direct kernel and Winograd's F(2x2, 3x3) and F(4x4, 3x3).

    Medians are seconds of one run. "taken" is the method that builds on that target take: the fastest, but Winograd's
    only where it saves 2 % of the direct kernel's time.
    """
    from tvmflow.database import Store, tables

    reading = Store(database).read()
    show_frame(tables.comparisons(reading.comparisons), as_json)
    warn(reading.faults)


@db.command()
@click.argument("into", type=FOLDER)
@click.argument("sources", nargs=-1, required=True, type=FOLDER)
@click.option("--replay/--no-replay", default=True, help="Whether the traces of new records are replayed first.")
@options.as_json
@options.debug
def merge(into: Path, sources: tuple[Path, ...], replay: bool, as_json: bool, debug: bool) -> None:
    """Join databases: put the records of SOURCES into INTO, which is made if need be.

    Of each key the record with the lower median time stays, whatever the order, of each convolution the newer
    comparison of its methods, and of each candidate in quarantine the higher count. SOURCES stay as they are. Faulty
    lines, and records that cannot be replayed, are skipped and named, and the exit code is 15 then; every good record
    was merged all the same.
    """
    import pandas as pd

    from tvmflow.database import Store
    from tvmflow.exchange import conversion

    report: list[dict[str, Any]] = []
    faults: list[Fault] = []
    for source in sources:
        Store(source).read()  # all are there before one is merged
    for source in sources:
        done = conversion.merge(Store(into), Store(source), replay)
        faults += done.faults
        report.append(
            {
                "source": str(source),
                "records": done.records,
                "new": len(done.added.new),
                "improved": len(done.added.improved),
                "faults": len(done.faults),
            }
        )
    show_frame(pd.DataFrame(report), as_json)
    fail_on(faults)


@db.command()
@click.argument("a", type=FOLDER)
@click.argument("b", type=FOLDER)
@options.as_json
@options.debug
def diff(a: Path, b: Path, as_json: bool, debug: bool) -> None:
    """Show which records differ between the databases A and B: only in one, or faster in one.

    "B / A" is B's median time as a share of A's: below 1, B is faster. "changed" is another record of equal time.
    """
    from tvmflow.database import Store, tables

    ours, theirs = Store(a).read(), Store(b).read()
    show_frame(tables.diff(ours.records, theirs.records), as_json)
    warn((*ours.faults, *theirs.faults))


@db.command()
@database
@click.option("--key", "keys", multiple=True, metavar="PREFIX", help="Records whose key starts so; may be repeated.")
@click.option("--keep-keys", type=click.File(), metavar="FILE", help="Records whose key is no line of FILE (or -).")
@click.option("--tvm-before", metavar="VERSION", help="Records tuned with a TVM older than this.")
@click.option("--before", type=click.DateTime(["%Y-%m-%d"]), metavar="YYYY-MM-DD", help="Records tuned earlier.")
@click.option("--target", metavar="PATTERN", help="Records whose target folder matches, e.g. 'llvm-x86-64-v3-*'.")
@click.option("--faulty", is_flag=True, help="Also drop the lines that hold no record.")
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@options.as_json
@options.debug
def prune(database: Path, faulty: bool, dry_run: bool, as_json: bool, debug: bool, **conditions: Any) -> None:
    """Remove the records that meet all conditions given, and list them; without a condition none.

    The same conditions remove comparisons of a convolution's methods, but --keep-keys none of them. In either case the
    files are written anew in order: sorted, each key once, each record in its target's folder.
    Lines that hold no record stay unless --faulty is given: a newer tvmflow may have written them.
    """
    from tvmflow.database import Comparison, Record, Store, tables
    from tvmflow.database.selection import select

    chosen = select(**conditions)
    store = Store(database)
    if dry_run:
        reading = store.read()
        entries: tuple[Record | Comparison, ...] = (*reading.records, *reading.comparisons)
        removed = tuple(entry for entry in entries if chosen(entry))
    else:
        removed = store.prune(lambda entry: not chosen(entry), faulty)
    comparisons = [entry for entry in removed if isinstance(entry, Comparison)]
    show_frame(tables.records(entry for entry in removed if isinstance(entry, Record)), as_json)
    if comparisons:
        say(f"and {len(comparisons)} comparisons: {', '.join(one.key[:12] for one in comparisons)}", err=as_json)


@db.command()
@click.argument("key")
@click.argument("other", required=False)
@database
@options.as_json
@options.debug
def explain(key: str, other: str | None, database: Path, as_json: bool, debug: bool) -> None:
    """Say in which named parts KEY differs from OTHER, or from the nearest other record.

    KEY and OTHER are keys, beginnings of keys, or files that hold the parts of a key as JSON, for a key of which
    there is no record yet. The nearest record is one of the same workload if there is one.
    """
    from tvmflow.database import Store, difference
    from tvmflow.database.lookup import nearest

    records = Store(database).read().by_key
    parts = _parts(key, records, database)
    if other is not None:
        reference = _parts(other, records, database)
    else:
        near = nearest([record for record in records.values() if record.key != parts.key], parts)
        if near is None:
            raise DatabaseError(f"{database}: holds no other record to compare with", "give OTHER")
        reference = near.parts
    lines = difference(parts, reference)
    if as_json:
        say_json({"key": parts.key, "against": reference.key, "difference": lines})
        return
    for title, key in (("key", parts.key), ("against", reference.key)):
        say(f"{title:8}{key[:12]}  {records[key].name if key in records else 'no record'}")
    for line in lines or ["no difference"]:
        say(f"  {line}")


@db.command(name="install-merge-driver")
@database
@options.as_json
@options.debug
def install_merge_driver(database: Path, as_json: bool, debug: bool) -> None:
    """Make git merge the database's files by key, in this clone.

    Writes .git/config, which every clone needs once, and the rule in .gitattributes, which is committed. From then on
    `git merge`, `rebase` and `cherry-pick` keep the better record of each key and never ask.
    """
    from tvmflow.database.merge import install

    done = install(database)
    if as_json:
        say_json(done)
    for line in () if as_json else done or ("nothing to do, it is installed",):
        say(line)


@db.command(name="merge-driver", hidden=True)
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("ours", type=click.Path(path_type=Path))
@click.argument("theirs", type=click.Path(path_type=Path))
@click.argument("name", default="the database")
@options.debug
def merge_driver(base: Path, ours: Path, theirs: Path, name: str, debug: bool) -> None:
    """Called by git to merge one file: BASE, OURS and THEIRS are its versions, the result is written to OURS.

    The exit code is 0, or 15 where a side holds lines that are no records; they stand in a conflict block then.
    """
    from tvmflow.database.merge import merge_files

    faults = merge_files(base, ours, theirs, name)
    warn(faults)
    if faults:
        raise DatabaseError(
            f"{name}: lines that hold no record are in conflict",
            "remove the conflict block, or restore its lines, then `git add` the file",
        )


def _parts(key: str, records: dict[str, Record], database: Path) -> KeyParts:
    from pydantic import ValidationError

    from tvmflow.database import KeyParts

    if Path(key).is_file():
        try:
            return KeyParts.model_validate_json(Path(key).read_bytes())
        except ValidationError as exc:
            raise UsageError(
                f"{key}: not the parts of a key: {exc.errors()[0]['msg']}",
                "it holds workload, target, numerics and preparation",
            ) from None
    found = [record for record in records.values() if record.key.startswith(key)]
    if not found:
        raise _no_such(key, database)
    if len(found) > 1:
        raise UsageError(f"{key}: {len(found)} keys start so", "give more of it")
    return found[0].parts


def _no_such(key: str, database: Path) -> DatabaseError:
    return DatabaseError(f"{database}: no record's key starts with {key}", "`tvmflow db show` lists them all")


def _described(record: Record) -> Iterable[tuple[str, str]]:
    plain = record.model_dump(mode="json", exclude={"workload_json", "trace", "timings_s", "parts", "provenance"})
    yield "key", record.key
    yield from ((name, str(value)) for name, value in plain.items())
    yield "speed", f"{record.gflops:.4g} GFLOP/s, median {record.median_s * 1e6:.4g} us of {len(record.timings_s)}"
    yield "workload", record.parts.workload
    for section in ("target", "numerics"):
        for name, value in getattr(record.parts, section).items():
            yield f"{section}.{name}", " ".join(value) if isinstance(value, tuple) else str(value)
    yield "preparation", str(record.parts.preparation)
    for name, value in record.provenance.model_dump().items():
        yield name, ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
