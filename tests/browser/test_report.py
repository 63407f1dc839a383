"""The report in Chromium: desktop and phone, light and dark, with and without scripts, and never a network request."""

from __future__ import annotations

import io

import pytest
from PIL import Image

import kit
from kit.view.report import write_report

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report of two real runs, one of them with a fault."""
    folder = tmp_path_factory.mktemp("report")
    faults = {"good": None, "leak": "leaked-group"}
    runs = [kit.run("smoke", cycles=2, device="cpu", fault=fault, out=folder / name) for name, fault in faults.items()]
    return write_report(runs, folder / "report.html")


@pytest.mark.parametrize("width", [1280, 390])
def test_it_is_readable(page, report, artefacts, width):
    """The page itself never scrolls sideways; wide content scrolls inside its box and stays large enough to read. On a phone a picture
    fits the screen until it is tapped."""
    page.set_viewport_size({"width": width, "height": 844})
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto(report.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        boxes = page.locator(".box:visible").all()
        assert all(
            box.evaluate("box => box.scrollWidth === box.clientWidth || getComputedStyle(box).overflowX === 'auto'")
            for box in boxes
        )
        sizes = page.locator("td:visible, p:visible, dd:visible").evaluate_all(
            "all => all.map(one => parseFloat(getComputedStyle(one).fontSize))"
        )
        assert min(sizes) >= 13
        image = page.locator("section img").first
        assert image.evaluate("image => image.complete && image.naturalWidth") >= 1000
        if width < 640:
            assert image.bounding_box()["width"] <= width
            image.click()
        assert image.bounding_box()["width"] >= 700
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 27, 34)"}[scheme]
        page.screenshot(path=artefacts / f"report-{width}-{scheme}.png", full_page=True)
    assert all(url.startswith(("file:", "data:", "blob:")) for url in requests)
    assert page.errors == []


def test_the_runs_are_sorted_and_filtered_by_clicks_without_a_network(page, report, artefacts):
    page.goto(report.as_uri())
    page.locator("summary", has_text="table to sort and filter").click()
    rows = page.locator(".kit-runs table.dataTable tbody tr")
    rows.nth(1).wait_for()
    assert rows.count() == 2
    page.locator(".kit-runs thead th", has_text="fault").locator("button").last.click()
    page.locator(".dtcc-dropdown button", has_text="leaked-group").click()
    rows.nth(1).wait_for(state="detached")
    assert "leaked-group" in rows.first.inner_text()
    page.screenshot(path=artefacts / "report-runs.png")
    assert (page.errors, page.strays) == ([], [])


def test_the_picture_is_of_the_theme(page, report):
    for scheme, paper in (("light", (255, 255, 255)), ("dark", (22, 27, 34))):
        page.emulate_media(color_scheme=scheme)
        page.goto(report.as_uri())
        shown = page.locator("section img").first.screenshot()
        with Image.open(io.BytesIO(shown)) as picture:
            assert picture.convert("RGB").getpixel((picture.width - 20, 12)) == paper


def test_a_table_sorts_by_mouse_and_keyboard(page, report):
    page.goto(report.as_uri())
    table = page.locator("table.sorts", has=page.locator("th", has_text="median")).first
    cells = table.locator("tbody tr td:nth-child(4)")

    def seconds() -> list[float]:
        return [float(number) for number in cells.evaluate_all("all => all.map(one => one.dataset.n)")]

    written = seconds()
    head = table.locator("th").nth(3).locator("button")
    head.click()
    assert seconds() == sorted(written)
    head.press("Enter")
    assert seconds() == sorted(written, reverse=True)
    assert table.locator("th").nth(3).get_attribute("aria-sort") == "descending"


def test_a_timeline_opens_in_perfetto(page, report):
    """Perfetto's page is a stand-in with its protocol: it answers PING with PONG, then receives the trace."""
    viewer = """<script>
      addEventListener("message", (event) => {
        if (event.data === "PING") event.source.postMessage("PONG", "*");
        else document.title = `${event.data.perfetto.title} ${event.data.perfetto.buffer.byteLength}`;
      });
    </script>"""
    page.context.route("https://ui.perfetto.dev/**", lambda route: route.fulfill(body=viewer, content_type="text/html"))
    page.goto(report.as_uri())
    button = page.locator("button.trace").first
    with page.expect_popup() as opened:
        button.click()
    opened.value.wait_for_function("document.title")
    name, size = opened.value.title().split()
    assert name == button.get_attribute("data-title")
    assert int(size) == button.evaluate("one => atob(one.dataset.trace).length") > 500


def test_it_needs_no_scripts(page, report):
    bare = page.context.browser.new_page(java_script_enabled=False)
    bare.goto(report.as_uri())
    assert bare.locator("h2").count() == 3
    assert bare.locator("td", has_text="groups_return_to_baseline").count() >= 2
    bare.locator("summary", has_text="Config and provenance").first.click()
    assert bare.locator("pre", has_text='"host"').first.is_visible()
    bare.close()
