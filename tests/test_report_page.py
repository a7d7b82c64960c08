"""report.html: complete in one file, safe against any name, and usable in a real browser."""

import json
import re
import shutil
from urllib.parse import quote

import pandas as pd
import pytest

from normexp.report.__main__ import main
from normexp.report.page import curves, embedded
from tests import fake_runs

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ("--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-sync", *QUIET]
EVIL = '<img src=x onerror="document.title=1">&\'</script>'


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A small sweep, one run of which bears a name that would like to be markup."""
    folder = tmp_path_factory.mktemp("page")
    nodes = fake_runs.grid("ln rms", "pre post", (6,), (0,), 2)
    sweep = fake_runs.write_sweep(folder, "small", nodes)
    evil = fake_runs.write_run(folder / "runs", fake_runs.config("evil", "post", 6, 0, 9), "diverged")
    named = evil.rename(evil.parent / EVIL.replace("/", "∕"))  # a file name cannot hold a slash
    summary = json.loads((named / "summary.json").read_text())
    (named / "summary.json").write_text(json.dumps(summary | {"run_id": named.name, "reason": EVIL}))
    (folder / "runs" / f"damaged {named.name}").mkdir()
    (folder / "runs" / f"damaged {named.name}" / "summary.json").write_text("{")
    assert main([str(folder / "runs"), "--out", str(sweep)]) == 0
    return sweep / "report.html", named.name


def test_the_page_needs_nothing_but_itself(report):
    text = report[0].read_text()
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert not re.findall(r"<(?:script|link|iframe)[^>]*(?:src|href)=", text)
    assert not re.findall(r"@import|url\(", text)
    assert set(re.findall(r'<img src="([^;"]*)', text)) == {"data:image/png"}


def test_names_are_escaped_everywhere(report):
    text = report[0].read_text()
    assert "&lt;img src=x onerror=" in text
    assert "<img src=x" not in text
    assert text.count("</script>") == 2  # the data's and the program's own
    markdown = (report[0].parent / "REPORT.md").read_text()
    assert "<img" in markdown
    assert "<img" not in re.sub(r"`[^`\n]*`", "", markdown).replace(r"\<", "")  # in code or escaped, and nowhere else


def test_embedded_data_survives_any_string_and_refuses_what_is_not_json():
    assert json.loads(embedded({"</script>": ["<!--", None, 1.5]})) == {"</script>": ["<!--", None, 1.5]}
    assert "<" not in embedded("</script>")
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded(float("nan"))


def test_long_curves_are_thinned_and_keep_their_spikes():
    steps = pd.RangeIndex(1, 20_001, name="step")
    history = pd.DataFrame({"train/loss": 2.0, "grad_norm/layer_00": 1.0}, index=steps)
    history.loc[12_345, "train/loss"] = 9.0
    history.loc[15_000, "train/loss"] = float("inf")
    found = curves(history)
    logged, values = found["train"]
    assert len(logged) == len(values) <= 400
    assert (values[logged.index(12_345)], values[logged.index(15_000)]) == (9.0, None)
    assert len(found["blocks"][0]) <= 101


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="the extra `dev` brings playwright")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, report):
    """The page from its file, in a browser without a network; it must say nothing on the console."""
    context = browser.new_context(offline=True, viewport={"width": 1400, "height": 900})
    opened = context.new_page()
    said = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.goto(report[0].as_uri())
    yield opened
    title = opened.title()
    context.close()
    assert said == []
    assert title != "1"  # what the evil name would have set


def column(page, key, visible=True):
    place = page.eval_on_selector_all("#table-runs th", "all => all.map(one => one.dataset.column)").index(key)
    rows = "#table-runs tbody tr" + (":not([hidden])" if visible else "")
    return page.eval_on_selector_all(rows, f"all => all.map(row => row.cells[{place}].dataset.value)")


def test_a_click_sorts_up_and_then_down_with_what_is_missing_last(page):
    page.click("#table-runs th[data-column=val_loss] button")
    values = column(page, "val_loss")
    assert len(values) == 9
    numbers = [float(value) for value in values]
    assert numbers == sorted(numbers)
    assert numbers[-1] == float("inf")
    page.click("#table-runs th[data-column=val_loss] button")
    assert [float(value) for value in column(page, "val_loss")] == sorted(numbers, reverse=True)
    page.click("#table-runs th[data-column=first_bad_step] button")
    assert column(page, "first_bad_step")[-1] == ""
    assert page.get_attribute("#table-runs th[data-column=first_bad_step]", "aria-sort") == "ascending"
    assert page.get_attribute("#table-runs th[data-column=val_loss]", "aria-sort") is None
    page.click("#table-runs th[data-column=run_id] button")
    assert column(page, "run_id")[1:] == sorted(column(page, "run_id")[1:])  # text by the alphabet


def test_filters_hide_what_does_not_match_and_count(page):
    assert page.inner_text("#filters output") == "9 of 9 runs"
    page.select_option("select[data-column=verdict]", "collapsed")
    assert set(column(page, "verdict")) == {"collapsed"}
    page.select_option("select[data-column=norm]", "rms")
    assert (set(column(page, "norm")), set(column(page, "verdict"))) == ({"rms"}, {"collapsed"})
    page.fill("#filters input", "S1 post")
    (run,) = column(page, "run_id")
    assert run.startswith("rms-post-L6-w0-s1-")
    assert page.inner_text("#filters output") == "1 of 9 runs"
    page.fill("#filters input", "")
    page.select_option("select[data-column=norm]", "")
    page.select_option("select[data-column=verdict]", "")
    assert len(column(page, "run_id")) == 9


def test_a_run_leads_to_its_curves_and_back(page):
    assert not page.is_visible("#curves")
    page.click("#table-runs tbody tr:has-text('collapsed') a")
    name = page.inner_text("#curves h2")
    assert name in column(page, "run_id")
    assert page.url.endswith("#run=" + quote(name))
    assert page.locator("#curves svg").count() == 3
    path = page.get_attribute("#curves svg path", "d")
    assert len(re.findall("[ML]", path)) == 400  # every step
    box = page.locator("#curves svg").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 10, box["y"] + 50)
    assert re.search(r"step 400: training \d", page.inner_text("#curves .reading >> nth=1"))
    page.keyboard.press("Escape")
    assert not page.is_visible("#curves")
    page.go_back()
    assert page.inner_text("#curves h2") == name


def test_a_run_with_an_evil_name_that_diverged_shows_its_curves_too(page, report):
    page.goto(report[0].as_uri() + "#run=" + quote(report[1]))
    assert page.inner_text("#curves h2") == report[1]
    assert page.locator("#curves img").count() == 0
    assert page.locator("#curves svg").count() == 3
    assert page.locator('#curves svg rect[fill="#000"]').count() > 0  # not finite


def test_every_figure_is_shown_whole(page):
    sizes = page.eval_on_selector_all("figure img", "all => all.map(one => [one.naturalWidth, one.clientWidth])")
    assert len(sizes) >= 4
    assert all(natural > 0 and 0 < shown <= 1400 for natural, shown in sizes)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # wide tables scroll in their own box
