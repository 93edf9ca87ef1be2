"""Text that others wrote is shown, and does nothing else: in tables, lines, errors, TOML, Markdown, SVG, progress."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import pickle
import pty
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hostile import (
    LONG,
    NAMES,
    assert_plain,
    without_colours,
)
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from tvmflow import config, npz, report, text
from tvmflow.bucket_search import Found, choice, plot, toml
from tvmflow.bucket_search.observed import Observed
from tvmflow.cli import output
from tvmflow.config import faults
from tvmflow.diagnosis.findings import Attribution, Bisection, Culprit, KernelError, StageError, StepCheck
from tvmflow.errors import ConfigError, InputError, OutputError, UnsupportedError
from tvmflow.manifest import OutputVerdict, RunVerdict, Signature, TensorSpec, Verdict
from tvmflow.report import audit as report_audit
from tvmflow.report import buckets as report_buckets
from tvmflow.report import tables

ids = pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:12]))


def rendered(shown: tables.Shown, width: int = 160, colours: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colours, color_system="standard" if colours else None
    )
    console.print(tables.stack(shown), crop=False)
    return console.file.getvalue()  # type: ignore[attr-defined]


# --- characters -------------------------------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_characters="\\'")))
def test_escapes_are_those_of_python(content: str) -> None:
    shown = text.visible(content)
    assert shown.isprintable()
    assert ast.literal_eval(f"'{shown}'") == content


def test_what_can_be_seen_stays_as_it_is() -> None:
    seen = "C:\\models\\größe 大きさ גודל [x] µ"
    assert text.cell(seen) == text.line(seen) == seen
    assert text.visible("\udcff\x1b\u202e") == r"\udcff\x1b\u202e"


def test_long_words_lose_their_middle() -> None:
    assert text.shortened("abcdefgh", 5) == "ab…gh"
    assert text.shortened("abcde", 5) == "abcde"
    assert text.cell(f"is {LONG} here") == f"is {text.shortened(LONG, 60)} here"
    assert len(text.cell("a b" * 10_000)) == text.LONGEST_TEXT


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("colours", [True, False])
@pytest.mark.parametrize("width", [20, 80, 160])
@ids
def test_tables_and_lines(name: str, width: int, colours: bool) -> None:
    shown = tables.stack(
        tables.table((name, tables.Column(name, right=True)), [[(name, "red"), [name, ("x", "bold")]]], name),
        tables.pairs({name: name}),
        tables.line(("note ", "yellow"), name),
    )
    found = without_colours(rendered(shown, width, colours))
    assert_plain(found)
    assert f"note {text.line(name)}\n" in found
    assert re.sub(r"\s", "", text.cell(name)) in re.sub(r"\s", "", rendered(tables.table(("",), [[name]]), width))


def test_what_is_to_be_copied_stays_whole() -> None:
    assert rendered(tables.verbatim(f"{LONG}\n[x]\x1b\n"), 20) == f"{LONG}\n[x]\\x1b\n\n"


def tensor(name: str) -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=(name, 4))


def verdict_of(name: str) -> Verdict:
    out = OutputVerdict(
        name=name,
        ok=False,
        reason=name,
        rtol=1e-3,
        atol=1e-5,
        max_error=1.0,
        mean_error=1.0,
        max_relative_error=1.0,
        mismatched=1,
        total=2,
        nan_or_inf_differs=0,
        top1_agreement=None,
        top5_agreement=None,
    )
    return Verdict(
        ok=False, reference=name, notes=(name,), runs=(RunVerdict(inputs=name, dims={name: 3}, outputs=(out,)),)
    )


@ids
def test_reports(name: str) -> None:
    stage = StageError(
        stage=name,
        output=name,
        ok=False,
        max_error=1.0,
        max_relative_error=None,
        mismatched=1,
        total=2,
        change=None,
    )
    kernel = KernelError(kernel=name, call=1, ok=False, reason=name, max_error=1.0, share=0.5, rtol=0, atol=0)
    check = StepCheck(count=1, step=name, outcome="wrong", reason=name)
    culprit = Culprit(step=name, count=1, summary=name, kernels=(kernel,))
    nouns = (
        report.signature(Signature(inputs=(tensor(name),), outputs=(tensor(name),))),
        report.verdict(verdict_of(name)),
        report.attribution(Attribution(verdict=verdict_of(name), stages={name: name}, rows=(stage,))),
        report.bisection(
            Bisection(
                reference=name,
                steps=(name,),
                checks=(check,),
                culprit=culprit,
                unusable_records=(name,),
                reproducer=None,
            )
        ),
        report.pipeline({name: [(name, name)]}),
    )
    for noun in nouns:
        found = rendered(noun)
        assert_plain(found)
        assert re.sub(r"\s", "", text.cell(name))[:6] in re.sub(r"\s", "", found)


# --- buckets: tables, TOML, SVG ---------------------------------------------------------------------------------------


def found_of(*dims: str) -> Found:
    sizes = np.array([[1] * len(dims), [4] * len(dims)])
    seen = Observed(dims, sizes, np.array([3, 1]))
    proposal = choice.propose(seen, (1,) * len(dims), lambda sizes: np.asarray(sizes).prod(axis=-1) * 1e-3, 2)
    return Found(seen, proposal, {}, None, False, "estimated")


@ids
def test_dimensions_of_buckets(name: str) -> None:
    name = name + "\U0001f600\U000e0001"
    found = found_of(name, "batch")
    assert_plain(rendered(report_buckets.rendered(found)).replace(toml(found.proposal).strip(), ""))
    stated = tomllib.loads(toml(found.proposal))["shapes"]["buckets"]
    assert set(stated[0] if isinstance(stated, list) else stated) == {name, "batch"}
    for one in (found, found_of(name)):
        drawn = ElementTree.fromstring(plot.svg(one).encode())
        assert text.cell(name) in {node.text for node in drawn.iter("{http://www.w3.org/2000/svg}text")}


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_configs_as_toml_hold_every_name_and_no_control(name: str) -> None:
    cfg = config.from_dict({"model": {"entry": "m:f", "inputs": {name: {"shape": [1]}}}}) if name else None
    if cfg is not None:
        shown = config.to_toml(cfg)
        assert config.from_dict(tomllib.loads(shown)) == cfg
        assert all(char.isprintable() for char in shown.replace("\n", ""))


# --- Markdown ---------------------------------------------------------------------------------------------------------


@given(st.text(st.sampled_from("ab_*`|~$<>[]()&;\\!#-\n\x1b \u202e") | st.characters(), min_size=1, max_size=30))
def test_markdown_shows_every_character(name: str) -> None:
    document = f"| column |\n| --- |\n| {report_audit.escaped('x' + name + 'x')} |\n"
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(document)
    cells = [token for token in tokens if token.type == "inline"]
    assert len(cells) == 2
    children = cells[1].children or []
    assert {child.type for child in children} <= {"text", "text_special"}
    assert "".join(child.content for child in children) == text.cell(f"x{name}x")


# --- errors -----------------------------------------------------------------------------------------------------------


@ids
def test_errors_keep_their_lines(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    error = UnsupportedError(
        f"two of {name}", f"rename {name}", f"log of {name[:99]}\nsecond", items=[f"a {name}", name]
    )
    error = pickle.loads(pickle.dumps(error)).within(f"{name}: ")
    output.say_error(error, debug=True)
    err = capfd.readouterr().err
    assert_plain(err.replace("\t", ""))
    first, *items, hint = err.splitlines()[:4]
    assert first == f"error: {text.line(f'{name}: two of {name}')}"
    assert items == [f"  {text.line(f'a {name}')}", f"  {text.line(name)}"]
    assert hint == text.line(f"  next: rename {name}")


def test_an_error_says_its_items_with_its_message() -> None:
    error = faults.located("c.toml", ["a: wrong", "b\n: wrong"], "mend them")
    assert isinstance(error, ConfigError)
    assert str(error) == error.message == "c.toml: 2 errors\n  a: wrong\n  b\\n: wrong"
    assert error.on_one_line() == "c.toml: 2 errors; a: wrong; b\n: wrong"
    assert faults.located("c.toml", ["a: wrong"], "").message == "c.toml: a: wrong"


def test_a_path_that_is_not_utf_8(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/m\xff\x1b.onnx"
    Path(os.fsdecode(path)).touch()
    done = subprocess.run([sys.executable, "-m", "tvmflow.cli", "inspect", path], capture_output=True, check=False)
    assert done.returncode == ConfigError.exit_code
    assert b"its name is not UTF-8" in done.stderr
    assert rb"m\udcff\x1b.onnx" in done.stderr


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_shows_colours_unless_it_should_not(no_color: str, tmp_path: Path) -> None:
    shown, end = pty.openpty()
    arguments = [sys.executable, "-m", "tvmflow.cli", "run", "no\x1b[31mthing", "--seed", "0"]
    env = {**os.environ, "NO_COLOR": no_color, "TERM": "xterm"}
    done = subprocess.run(arguments, stdin=end, stdout=end, stderr=end, env=env, cwd=tmp_path, check=False)
    os.close(end)
    found = os.read(shown, 1 << 16).decode()
    os.close(shown)
    assert done.returncode == 9
    assert r"no\x1b[31mthing: no artifact is there" in found
    assert ("\x1b[31merror" in found) == (not no_color)


def test_an_encoding_without_the_characters() -> None:
    code = "from tvmflow.cli import output; output.prepare_streams(); output.say('gr\xf6\xdfe \u2264 \u2588')"
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=True)
    assert done.stdout == b"gr\xf6\xdfe \\u2264 \\u2588\n"


@ids
def test_progress(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with output.progress("starting") as update:
        update(name)
    with output.progress_of(name, 10.0) as update_bar:
        update_bar(name, 5.0)
    found = capsys.readouterr().err
    assert text.cell(name)[:8] in found
    assert_plain(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", found).replace("\r", "\n"))
    assert "\x1b[2J" not in found


# --- arrays by name ---------------------------------------------------------------------------------------------------


@given(st.sets(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1))
def test_names_of_arrays_come_back(names: set[str]) -> None:
    names = {name for name in names if f"{name}.npy" not in names}
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"tvmflow-names-{os.getpid()}.npz"
    try:
        npz.write(path, {name: np.array([len(name)]) for name in names})
        assert npz.read(path).keys() == names
        with np.load(path) as archive:
            assert {name: int(archive[name][0]) for name in names} == {name: len(name) for name in names}
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("names", [["y\0z"], ["y" * 70_000], ["\udcff"], ["x", "x.npy"]])
def test_names_that_an_npz_cannot_hold(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot hold an array called"):
        npz.write(tmp_path / "a.npz", {name: np.zeros(1) for name in names})
    assert not list(tmp_path.iterdir())


def test_damaged_arrays(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.arange(1000))
    whole = path.read_bytes()
    for at in range(30, len(whole), 40):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with contextlib.suppress(InputError):
            assert all((array == np.arange(1000)).all() for array in npz.read(path).values())
