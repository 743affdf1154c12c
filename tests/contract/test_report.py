"""The page of ``apexrl report``: of a trained run, and in a browser.

In the browser it draws, answers, fetches nothing, and runs nothing but its own scripts. ``make install-chromium`` gets
the browser; ``APEXRL_CHROMIUM`` names another one.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Page, sync_playwright
from tests.suite_session import options
from tests.unit.experiments.report.test_page import Reader
from tests.unit.experiments.report.test_runs import evaluate_run, make_run

from apexrl import ActorCritic, make_env, record_video
from apexrl.cli.main import main
from apexrl.collectors.init_states import RolloutStats
from apexrl.core.system.files import read_json_lines
from apexrl.core.system.provenance import add_start
from apexrl.experiments.report.page import show

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SHORT = {
    "task.num_envs": "8",
    "algo.num_steps": "16",
    "training.total_timesteps": "512",
    "training.final_eval_episodes": "6",
    "training.device": "cpu",
    "features.save_plot": "false",
    "logging.tensorboard": "false",
}
EVIL = "<script>document.title='broken'<script><img src=x onerror=document.title='broken'>"
BRIGHTNESS = """selector => {
    const style = getComputedStyle(document.querySelector(selector));
    const parts = (selector === "body" ? style.backgroundColor : style.fill).match(/[\\d.]+/g).map(Number);
    return parts[0] + parts[1] + parts[2];
}"""


def test_a_run_becomes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    assert main(["train", "lift_ppo", "--run-dir", str(run_dir), *options(SHORT)]) == 0
    assert main(["report", str(run_dir)]) == 0
    assert f"{run_dir}/report.html" in capsys.readouterr().out
    page = Reader((run_dir / "report.html").read_text(encoding="utf-8"))
    assert page.has("1 run on lift.")
    assert page.has(f"apexrl eval {run_dir} --episodes 6")
    assert not page.has("Notes")
    (start,) = read_json_lines(run_dir / "starts.jsonl")
    assert page.has(f"{run_dir} {start['time']} 0 {start['commit'] or '–'} host {socket.gethostname()}, ")
    assert "video" in [tag for tag, _ in page.tags]
    final = read_json_lines(run_dir / "evaluations.jsonl")[-1]
    low, high = (show(bound, "number") for bound in final["return_interval"])
    assert page.has(f"{show(final['return'], 'number')} {low} to {high}")


def find_chromium() -> str | None:
    unpacked = ROOT / ".chromium" / "chromium"
    names = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
    found = [os.environ.get("APEXRL_CHROMIUM"), str(unpacked) if unpacked.exists() else None, *map(shutil.which, names)]
    return next(filter(None, found), None)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about two seeds of one configuration and one run of another, whose name is an attack."""
    runs = tmp_path_factory.mktemp("report")
    paths = [make_run(runs / "fast" / f"seed-{seed}", seed, lines=20) for seed in (0, 1)]
    paths.append(make_run(runs / EVIL, algo__learning_rate=0.5, lines=20))
    for path in paths:
        evaluate_run(path, 2000, **{"return": [1.0, 3.0], "success_once": [0.0, 1.0]})
    env = make_env("lift", 1, max_episode_steps=40)
    record_video(env, ActorCritic.for_env(env), paths[0] / "video.mp4")
    stats = RolloutStats(paths[2] / "rollout_stats.json")
    stats.record("a" * 64, [True, False], EVIL)
    stats.write()
    add_start(paths[0], 0, torch.device("cpu"))
    assert main(["report", str(runs / "fast"), str(paths[2]), "--output", str(runs / "page.html")]) == 0
    return runs / "page.html"


@pytest.fixture(scope="module")
def opened(report: Path) -> Iterator[tuple[Page, list[str]]]:
    """The page in a browser, and what the browser complained about or asked the network for."""
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("needs Chromium: run 'make install-chromium', or set APEXRL_CHROMIUM")
    problems: list[str] = []

    def watch(url: str) -> None:
        if not url.startswith(("file:", "data:", "blob:")):
            problems.append(f"request: {url}")

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(color_scheme="light", viewport={"width": 1200, "height": 900})
        page.set_default_timeout(120_000)  # a busy machine takes half a minute to read plotly.js
        page.on("console", lambda message: problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", lambda request: watch(request.url))
        page.goto(report.as_uri())
        page.wait_for_selector("html[data-ready]")
        yield page, problems
        browser.close()


@pytest.fixture
def page(opened: tuple[Page, list[str]]) -> Iterator[Page]:
    page, problems = opened
    yield page
    assert problems == []


def test_the_page_draws_every_plot_and_shows_a_value_on_hover(page: Page) -> None:
    shown = page.locator(".plot:not(details .plot)")
    assert shown.count() == 4  # return, success, map of init states, time
    assert page.locator(".plot:not(details .plot) .main-svg").count() >= 4
    curve = page.locator("#curves .plot").first
    curve.scroll_into_view_if_needed()
    point = curve.locator(".points path").first.bounding_box()
    assert point is not None
    page.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
    label = curve.locator(".hoverlayer .legend")
    label.wait_for()
    # Seeds 0 and 1 returned 20 and 21 at the end: 20.5 ± 12.706 · 0.5. Both evaluations gave 2.
    assert "fast : 20.5 [14.15, 26.85]" in label.text_content()  # type: ignore[operator]
    assert "fast, evaluation : 2 [2, 2]" in label.text_content()  # type: ignore[operator]


def test_a_run_can_be_switched_off_and_on_with_mouse_and_keyboard(page: Page) -> None:
    lines = page.locator("#curves .plot").first.locator(".scatterlayer .trace")
    button, card = page.locator("[data-toggle='0']"), page.locator("#videos figure[data-group='0']")
    both = lines.count()
    assert card.is_visible()
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert lines.count() == 2  # a line and a point of the other run
    assert not card.is_visible()
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert lines.count() == both == 7  # with the band, two thin lines, the mean and a point


def test_curves_in_a_closed_part_are_drawn_when_it_is_opened(page: Page) -> None:
    part = page.locator("details", has_text="time/").first
    assert part.locator(".main-svg").count() == 0
    part.locator("summary").press("Enter")
    part.locator(".main-svg").first.wait_for()
    assert part.locator(".plot .scatterlayer").count() == part.locator(".plot").count() == 2


def test_both_colour_schemes_can_be_read_and_a_change_is_followed(page: Page) -> None:
    assert page.evaluate(BRIGHTNESS, "body") > 700
    assert page.evaluate(BRIGHTNESS, ".xtick text") < 350
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"() => ({BRIGHTNESS})('.xtick text') > 400")
    assert page.evaluate(BRIGHTNESS, "body") < 150
    page.emulate_media(media="print")
    assert page.evaluate(BRIGHTNESS, "body") == 3 * 255
    page.emulate_media(media="screen", color_scheme="light")


def test_the_page_fits_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("() => document.querySelector('.plot svg').getBoundingClientRect().right <= 390")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.set_viewport_size({"width": 1200, "height": 900})


def test_the_video_can_be_played_and_a_name_is_nothing_but_text(page: Page) -> None:
    page.wait_for_function("() => document.querySelector('video').duration > 0.5")
    assert page.title() == "2 configurations · ApexRL report"
    assert page.locator(".legend button").nth(1).inner_text() == EVIL
    assert page.locator("main img").count() == 0


def test_a_script_that_would_get_into_the_page_does_not_run(page: Page, report: Path) -> None:
    broken = report.with_name("injected.html")
    text = report.read_text(encoding="utf-8")
    broken.write_text(text.replace("<main>", "<main><script>document.title = 'ran'</script>"), encoding="utf-8")
    assert page.context.browser is not None
    other = page.context.browser.new_page()
    complaints: list[str] = []
    other.on("console", lambda message: complaints.append(message.text))
    other.goto(broken.as_uri())
    assert other.title() != "ran"
    assert any("Content Security Policy" in complaint for complaint in complaints)
    other.close()
