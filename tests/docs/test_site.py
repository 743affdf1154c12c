"""The site of the documentation builds and needs no network; the page of benchmarks is current."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeout
from tests.contract.test_report import find_chromium

import apexrl

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = find_chromium()
sys.path.insert(0, str(ROOT / "benchmarks"))

import page as benchmark_page  # noqa: E402

pytestmark = pytest.mark.slow

# The page of benchmarks


def test_the_page_of_benchmarks_is_current() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert text == benchmark_page.page(), "run: python benchmarks/page.py"


def test_every_record_has_a_command_that_exists() -> None:
    for path in (ROOT / "benchmarks").glob("*.json"):
        command = benchmark_page.COMMANDS.get(path.stem, f"python benchmarks/{path.stem}.py")
        title = benchmark_page.description(command)
        assert title, f"name the command of {path.name} in COMMANDS of benchmarks/page.py"


def test_a_record_of_any_shape_gets_a_section(tmp_path: Path) -> None:
    rows = [{"name": "ours", "seed": seed, "score": score, "curve": [1, 2]} for seed, score in ((0, 1.0), (1, 4.0))]
    records = {
        "empty": {},
        "nothing": {"rows": [], "mt10": 3},
        "seeds": {
            "rows": rows,
            "machine": {"cpu": "a chip", "cores": 2, "threads": 1},
            "commit": "abc",
            "note": "By hand.",
        },
        "modes": {"modes": {"fast": {"ms": 1234.5}, "slow": {"ms": None}}, "command": "make it"},
        "torture": {
            "lines": [{"what": "kills", "tried": 1000, "lost": []}, {"what": "discs", "tried": 3, "lost": ["x"]}]
        },
    }
    for name, record in records.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    text = benchmark_page.page(tmp_path)
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == sorted(records)
    assert "| ours | 2 | 2.5 (1 to 4) |" in text
    assert "Measured on a chip; 2 cores; 1 thread; no GPU; commit abc." in text
    assert "```bash\nmake it\n```" in text
    assert "| fast | 1,234 |" in text
    assert "| slow | – |" in text
    assert "| kills | 1,000 | nothing |" in text
    assert "| discs | 3 | 1 |" in text


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return place


def test_the_site_needs_no_network(site: Path) -> None:
    pages = [path.read_text(encoding="utf-8") for path in site.rglob("*.html")]
    assert len(pages) > 50
    for text in pages:
        tags = re.findall(r"<(?:script|link|img|iframe|source|video)\b[^>]*>", text)
        assert not [tag for tag in tags if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag)]
    for path in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )['\"]?(?:https?:)?//", path.read_text(encoding="utf-8")), path


def test_the_readme_is_the_home_page(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    assert "Three results" in text
    assert 'href="quickstart.html"' in text
    assert 'src="images/robots.gif"' in text


def test_an_equation_leads_to_its_line(site: Path) -> None:
    target, line = re.findall(
        r'href="(source/[^"#]+/objectives\.py\.html)#__codelineno-0-(\d+)"><code>gae<', (site / "ppo.html").read_text()
    )[0]
    assert f'id="__codelineno-0-{line}"' in (site / target).read_text(encoding="utf-8")
    source = (ROOT / "src" / "apexrl" / "core" / "functional" / "objectives.py").read_text().splitlines()
    assert source[int(line) - 1].startswith("def gae(")


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    missing = [name for name in apexrl.__all__ if name != "__version__" and f'id="apexrl.{name}"' not in text]
    assert not missing, f"add '::: apexrl.NAME' to docs/api.md for {missing}"


def test_the_reference_keeps_equations_as_they_are_written(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "api.html").read_text(encoding="utf-8"))
    assert "V(s'_t) − V(s_t)\nA_t = δ_t + γ λ (1 − done_t) A_{t+1}\n" in text.replace("&#39;", "'")


SEARCHES = {
    "image observations": ("how_do_i.html", "policies.html"),
    "early stopping": ("callbacks_and_loggers.html",),
    "learning rate": ("how_do_i.html",),
    "fine-tune": ("how_do_i.html",),
    "multi-GPU": ("scaling_out.html",),
    "load a trained policy": ("how_do_i.html", "use_a_policy.html"),
    "REDQ": ("sac.html",),
}
"""What is typed into the search, and the pages of which one has to come first."""


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: make install-chromium")
def test_the_search_of_a_page_opened_from_the_disk_finds_the_right_page_first(site: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        first = {words: first_hit(browser.new_page(), site, words) for words in SEARCHES}
        browser.close()
    wrong = {words: hit for words, hit in first.items() if hit not in SEARCHES[words]}
    assert not wrong


def first_hit(tab: Page, site: Path, words: str) -> str:
    """The name of the page that the search lists first."""
    hits = tab.locator(".md-search-result__item > a.md-search-result__link")
    for _ in range(10):  # what is typed before the index is read goes unnoticed
        tab.goto((site / "index.html").as_uri())
        tab.wait_for_timeout(1_000)
        tab.fill("input[name=query]", words)
        with contextlib.suppress(PlaywrightTimeout):
            hits.first.wait_for(state="attached", timeout=10_000)
            break
    target = hits.first.get_attribute("href") or ""
    tab.close()
    return target.partition("?")[0].partition("#")[0].rpartition("/")[2]
