"""Docs say what is there: every config key with its meaning, every exit code, every file they point to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from tvmflow import config, errors
from tvmflow.cli import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_config_key_is_documented() -> None:
    page = (ROOT / "docs" / "config.md").read_text()
    for section, field in config.Config.model_fields.items():
        part = page.partition(f"## {section}\n")[2].partition("\n## ")[0].replace("\\|", "|")
        tables = get_args(field.annotation) or (field.annotation,)  # of a table of sections, the section
        for key, entry in tables[-1].model_fields.items():
            assert f"| `{key}` |" in part
            assert entry.description, f"{section}.{key} has no description"
            assert entry.description in part


def test_every_exit_code_is_documented() -> None:
    page = (ROOT / "docs" / "guide.md").read_text()
    codes = {cls.exit_code for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, Exception)}
    for code in codes - {1} | {errors.EXIT_BUG, errors.EXIT_INTERRUPTED}:
        assert f"| {code} |" in page
        assert f" {code} " in (cli.help or "")


def test_the_architecture_page_names_every_room_and_nothing_else() -> None:
    package, page = ROOT / "tvmflow", (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]+)*(?:/|\.py))`", page))
    assert [path for path in sorted(named) if not (package / path).exists()] == []
    rooms = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    modules = {path.name for path in package.glob("*.py") if path.name != "__init__.py"}
    assert rooms | modules <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not link.startswith("https:"):
            assert (page.parent / link).exists(), link


def test_the_readme_fits_a_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 60
