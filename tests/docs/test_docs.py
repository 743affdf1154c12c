"""The documentation is true: its code runs, its commands parse, its links lead somewhere, its tables are current.

``python tests/docs/test_docs.py`` writes the table of configuration fields into ``docs/configuration.md``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from apexrl import cli, envs
from apexrl.algorithms import ALGORITHMS
from apexrl.collectors.demonstrations import record as demos
from apexrl.core import plugins
from apexrl.core.errors import ApexRLError
from apexrl.core.validation import field_help, field_rules
from apexrl.experiments import jobs, plots, report
from apexrl.run import directory as run
from apexrl.run import sources, trained_policy
from apexrl.run.config import CONFIG_SECTIONS, SECTION_CHOICES
from apexrl.run.suite import SuiteConfig
from apexrl.run.tasks import TaskConfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TRANSLATIONS = {
    path: path.with_name(path.name.replace(".zh", ""))
    for path in [ROOT / "README.zh.md", *(ROOT / "docs").glob("*.zh.md")]
}
"""Pages in Chinese, and those that they say the same as."""
ALL_PAGES = [
    *PAGES,
    *(ROOT / name for name in ("README.zh.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs" / "adr").glob("*.md")),
]
BEGIN, END = "<!-- fields:begin -->", "<!-- fields:end -->"


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    """Of its first line of code, counted from 1."""
    code: str


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(text[: match.start(1)].count("\n") + 1, match[1]) for match in found]


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Python


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and page not in TRANSLATIONS], ids=name_of
)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        # Empty lines before it make a traceback point to the line of the page.
        exec(compile("\n" * (block.line - 1) + block.code, name_of(page), "exec"), namespace)
        printed = capsys.readouterr().out
        # What a comment behind a print says is what it prints; dots stand for anything.
        for promise in re.findall(r"^ *print\(.*\)  # (.*)$", block.code, re.MULTILINE):
            assert all(part.strip() in printed for part in promise.split("...")), f"{name_of(page)}: {promise}"


def test_the_first_example_of_the_readme_is_short() -> None:
    block = blocks(ROOT / "README.md", "python")[0]
    code = [line for line in block.code.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(code) <= 15


# Commands


def commands(program: str) -> list[tuple[str, list[str]]]:
    """Every call of a program in the bash blocks, with the page and line where it stands."""
    found = []
    for page in ALL_PAGES:
        for block in blocks(page, "bash"):
            for offset, line in enumerate(block.code.splitlines()):
                words = shlex.split(line, comments=True)
                if words and Path(words[0]).name == program:
                    found.append((f"{name_of(page)}:{block.line + offset}", words[1:]))
    return found


class _UnderstoodError(ApexRLError):
    """Raised in place of the work, once a command line has been understood."""


@pytest.mark.parametrize("words", [pytest.param(words, id=where) for where, words in commands("apexrl")])
def test_an_apexrl_command_is_understood(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [f"runs/{name}/config.yaml" for name in ("mine", "first", "second", "python")]
    for name in ("my_run.yaml", *runs):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    from tests.doc_files import write_files  # not where this file is run as a script

    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    monkeypatch.setattr(plugins, "_trust", plugins.Trust())

    def understood(*arguments: Any, **options: Any) -> None:
        raise _UnderstoodError("understood")

    def resume(run_dir: Path, overrides: Iterable[tuple[str, str]], loggers: Any) -> None:
        run.resumed_config(run_dir, overrides)
        understood()

    monkeypatch.setattr(run, "start", understood)
    monkeypatch.setattr(run, "resume", resume)
    monkeypatch.setattr(trained_policy, "load_trained", understood)
    monkeypatch.setattr(jobs, "run_jobs", understood)
    monkeypatch.setattr(TaskConfig, "make_env", understood)
    monkeypatch.setattr(SuiteConfig, "make_env", understood)
    monkeypatch.setattr(plots, "plot_runs", understood)
    monkeypatch.setattr(report, "write_report", understood)
    monkeypatch.setattr(demos, "record_demos", understood)
    monkeypatch.setattr(envs, "make_env", understood)
    monkeypatch.setattr(sources, "preset_names", understood if words[0] == "list" else sources.preset_names)
    if words[-1] in ("--help", "--help-all"):
        assert cli.main(words) == 0
        assert "algo.learning_rate" in capsys.readouterr().out
        return
    cli.main(words)
    assert capsys.readouterr().err == "apexrl: understood\n"


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(
    "words", [words for _, words in commands("apexrl") if words[0] in ("list", "check-env")], ids=" ".join
)
def test_a_cheap_command_succeeds(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    assert capsys.readouterr().out.strip()


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for _, words in commands("make") for word in words}
    for page in ALL_PAGES:
        named |= set(re.findall(r"`make ([a-z-]+)`", page.read_text(encoding="utf-8")))
    assert named
    assert named <= targets


# Links


def anchor(heading: str) -> str:
    """The name that a Markdown viewer gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def links(page: Path) -> list[tuple[str, str]]:
    found = re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", without_code(page))
    return [(text, target) for text, target in found if not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_every_link_and_image_of_a_page_leads_somewhere(page: Path) -> None:
    for text, target in links(page):
        path, _, fragment = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{name_of(page)}: {target}"
        if fragment:
            headings = re.findall(r"^#+ (.*)$", without_code(place), re.MULTILINE)
            assert fragment in {anchor(heading) for heading in headings}, f"{name_of(page)}: {target}"
        name = text.strip("`")
        if place.suffix == ".py" and text.startswith("`"):
            defined = rf"^\s*(?:def|class) {name}\b|^\s*{name}\b.*="
            assert re.search(defined, place.read_text(), re.MULTILINE), f"{name_of(page)}: no {name} in {path}"


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    for path in re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists() or (ROOT / "src" / "apexrl" / path).exists(), f"{name_of(page)}: {path}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            targets = [(page.parent / target.partition("#")[0]).resolve() for _, target in links(page)]
            waiting += [target for target in targets if target.suffix == ".md" and target.is_file()]
    assert set(ALL_PAGES) <= reached


def test_images_are_small() -> None:
    images = list((ROOT / "docs" / "images").iterdir())
    assert images
    assert all(image.stat().st_size < (2_000_000 if image.suffix == ".gif" else 200_000) for image in images)


# Translations


def said(page: Path) -> dict[str, set[str]]:
    """What both languages must have in common: blocks of code, code in the text, targets of links."""
    found = without_code(page)
    return {
        "code": set(re.findall(r"`([^`\n]+)`", found)),
        "targets": {target.replace(".zh.md", ".md") for _, target in links(page)} - {page.name.replace(".zh", "")},
    }


@pytest.mark.parametrize("page", TRANSLATIONS, ids=name_of)
def test_a_translation_has_the_code_the_commands_and_the_links_of_its_original(page: Path) -> None:
    original = TRANSLATIONS[page]
    for language in ("python", "bash"):
        assert [block.code for block in blocks(page, language)] == [block.code for block in blocks(original, language)]
    assert said(page) == said(original)
    assert {page.name} & {target for _, target in links(original)}
    assert {original.name} & {target for _, target in links(page)}


# Tables


def field_table() -> str:
    """A table for each section, with the default, the type and the sentence of every field."""
    lines = []
    for section, cls in ((section, cls) for section, classes in CONFIG_SECTIONS.items() for cls in classes):
        texts, rules, defaults = field_help(cls), field_rules(cls), cls()
        which = f" {SECTION_CHOICES[cls].replace('--', '')}" if len(CONFIG_SECTIONS[section]) > 1 else ""
        lines += [
            "",
            f"### Section {section}{which}",
            "",
            "| field | default | type or choices | meaning |",
            "|---|---|---|---|",
        ]
        for entry in fields(cls):
            value = getattr(defaults, entry.name)
            shown = "null" if value is None else str(list(value) if isinstance(value, tuple) else value)
            meaning = texts[entry.name].replace("``", "`").replace("|", "\\|")
            kind = rules[entry.name].removeprefix("an ").removeprefix("a ")
            lines.append(f"| `{section}.{entry.name}` | `{shown}` | {kind} | {meaning} |")
    return "\n".join([*lines[1:], ""])


def with_field_table(text: str) -> str:
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{field_table()}\n{END}{tail}"


def test_the_table_of_fields_is_current() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert text == with_field_table(text), "run: python tests/docs/test_docs.py"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_page_of_an_algorithm_names_every_option(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    options = {entry.name for entry in fields(ALGORITHMS[name].config_class)} - {"name"}
    assert options <= set(re.findall(r"`(\w+)`", text))


if __name__ == "__main__":
    page = ROOT / "docs" / "configuration.md"
    page.write_text(with_field_table(page.read_text(encoding="utf-8")), encoding="utf-8")
