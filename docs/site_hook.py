"""The site holds what its pages link to, so that one link serves a repository browser and the site.

A hook of MkDocs (``mkdocs.yml``). ``README.md`` becomes the home page; any other file outside ``docs/`` that a page
links to is added: data as it is, code as a page with numbered lines. A link whose text is the name of something leads
to the line that defines it. ``Equations`` keeps the equations of docstrings as they are written.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {
    "README.md": "index.md",
    "README.zh.md": "index.zh.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Files of the root that are pages of the site."""
UNSEARCHED = ("adr/", "benchmarks.md", "changelog.md")
"""Decisions and records: they mention everything and explain how to do nothing."""
REFERENCE = ("api.md", "configuration.md")
"""Pages that the search lists after those that explain."""
DATA = {".gif", ".json", ".png"}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
EQUATION = re.compile(r"\S+(?: \S+)? [=←] ")
"""How a paragraph with an equation begins."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and what they and the pages of ``docs/`` link to."""
    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    for page in list(files.documentation_pages()):
        for _, target, _ in links(page.content_string, page.src_uri):
            uri = uri_of(target)
            if files.get_file_from_path(uri) is not None:
                continue
            if target.suffix in DATA:
                files.append(File.generated(config, uri, abs_src_path=str(target)))
            else:
                files.append(File.generated(config, uri, content=as_page(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where their files are on the site; leave pages out of the search that answer no question."""
    here = page.file.src_uri
    if here.startswith(UNSEARCHED):
        page.meta["search"] = {"exclude": True}
    elif here in REFERENCE:
        page.meta["search"] = {"boost": 0.5}
    for match, target, text in list(links(markdown, here)):
        new = os.path.relpath(uri_of(target), Path(here).parent)
        markdown = markdown.replace(match, f"[{text}]({new}{fragment_of(match, target, text)})")
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Tell the check of links about the anchors of numbered lines, which it does not see by itself."""
    anchors = page.present_anchor_ids or set()
    page.present_anchor_ids = anchors | set(re.findall(r'(?:id|name)="(__codelineno-[\d-]+)"', html))
    return html


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Say which pages are in Chinese, so that browsers choose the right letters."""
    return output.replace('<html lang="en"', '<html lang="zh-CN"', 1) if ".zh." in page.file.src_uri else output


def links(markdown: str, uri: str) -> Iterator[tuple[str, Path, str]]:
    """The links of a page to files that are not where MkDocs looks for them: the link, its target and its text."""
    here = next((ROOT / name for name, page in PAGES.items() if page == uri), DOCS / uri)
    for match in LINK.finditer(markdown):
        target = (here.parent / match[2]).resolve()
        inside = here.is_relative_to(DOCS) and target.is_relative_to(DOCS)
        if not inside and target.is_file() and target.is_relative_to(ROOT):
            yield match[0], target, match[1]


def uri_of(path: Path) -> str:
    """Where a file of the repository is on the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return PAGES.get(name) or f"source/{name}" + ("" if path.suffix in DATA else ".md")


def fragment_of(link: str, target: Path, text: str) -> str:
    """The part of the target that a link means: as written, or the line that defines the name in its text."""
    written = LINK.fullmatch(link)
    if written and written[3]:
        return written[3]
    if target.suffix != ".py" or not text.startswith("`"):
        return ""
    name = re.escape(text.strip("`"))
    lines = target.read_text(encoding="utf-8").splitlines()
    defined = re.compile(rf"\s*(?:def|class) {name}\b|\s*{name}\b.*=")
    return next((f"#__codelineno-0-{number}" for number, line in enumerate(lines, 1) if defined.match(line)), "")


def as_page(path: Path) -> str:
    """A page that shows a file with numbered lines, and that the search leaves out."""
    language = LANGUAGES.get(path.suffix, "text")
    code = path.read_text(encoding="utf-8")
    head = "---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n"
    return f'{head}\n# {path.relative_to(ROOT)}\n\n``````{language} linenums="1"\n{code}``````\n'


class Equations(griffe.Extension):
    """Makes code of the paragraphs of docstrings that begin as an equation does; Markdown would read their signs."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring:
            first, *rest = obj.docstring.value.split("\n\n")
            changed = [textwrap.indent(part, "    ") if EQUATION.match(part) else part for part in rest]
            obj.docstring.value = "\n\n".join([first, *changed])
