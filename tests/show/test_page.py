"""The HTML page: one file, read by a browser without errors, with the numbers where the mouse rests."""

import json
import re
from dataclasses import replace

import pytest

from dit_pipelining.lowering.names import data_size, duration
from dit_pipelining.show.data import as_data
from dit_pipelining.show.html import html_page
from tests.browser import HOW_TO_GET_ONE, find_browser, open_browser


@pytest.fixture(scope="module")
def page(picture, tmp_path_factory):
    """The page in a headless Chromium."""
    browser = find_browser()
    if browser is None:
        pytest.skip(HOW_TO_GET_ONE)
    folder = tmp_path_factory.mktemp("page")
    file = folder / "picture.html"
    file.write_text(html_page(picture), encoding="utf-8")
    (folder / "profile").mkdir()
    with open_browser(browser, folder / "profile") as opened:
        opened.open(file)
        yield opened


def test_the_page_loads_without_errors_and_asks_for_nothing_else(page):
    assert page.problems == []
    assert [url.rpartition("/")[2] for url in page.requests] == ["picture.html"]


def test_every_block_is_drawn_in_the_colour_of_its_stage(page, picture):
    (report,) = picture.reports
    drawn = page.evaluate(
        "[...document.querySelectorAll('.block')].map(b => [b.dataset.stage, getComputedStyle(b).fill, "
        "b.getBoundingClientRect().width])"
    )
    assert [int(stage) for stage, _, _ in drawn] == [block.stage for block in report.blocks]
    colours = {stage: {fill for own, fill, _ in drawn if own == stage} for stage, _, _ in drawn}
    assert all(len(fills) == 1 for fills in colours.values())
    assert len(set.union(*colours.values())) == 3
    assert all(width > 3 for _, _, width in drawn)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (".block", lambda p: [p.reports[0].blocks[0].name, data_size(p.reports[0].blocks[0].parameter_bytes)]),
        (".stage", lambda p: ["stage 0", duration(p.timeline.workload.stage_seconds[0])]),
        (".boundary", lambda p: ["stage 0 to 1", *(value.origin for value in p.reports[0].boundaries[0])]),
        (".part", lambda p: ["rank 0, weights", data_size(p.memory[0].weights)]),
        (".span", lambda p: ["request 0, step 0, call 0", duration(p.timeline.spans[0].seconds)]),
    ],
)
def test_resting_the_mouse_shows_numbers(page, picture, selector, expected):
    page.move_mouse("h1")
    assert page.evaluate("document.getElementById('tip').hidden")
    page.move_mouse(selector)
    assert not page.evaluate("document.getElementById('tip').hidden")
    shown = page.evaluate("document.getElementById('tip').textContent")
    for part in expected(picture):
        assert part in shown
    box = page.evaluate(
        "(() => { const b = document.getElementById('tip').getBoundingClientRect(); return [b.left, b.top, b.right, "
        "b.bottom, innerWidth, innerHeight] })()"
    )
    assert 0 <= box[0] < box[2] <= box[4]
    assert 0 <= box[1] < box[3] <= box[5]


def test_text_stands_out_from_the_ground_in_light_and_in_dark(page):
    def luminance(colour):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    grounds = []
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        ground = luminance(page.evaluate("getComputedStyle(document.querySelector('section')).backgroundColor"))
        for selector, attribute in (("section h2", "color"), ("section small", "color"), ("svg text.soft", "fill")):
            ink = luminance(page.evaluate(f"getComputedStyle(document.querySelector({selector!r})).{attribute}"))
            bright, dark = max(ink, ground), min(ink, ground)
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, (scheme, selector)  # WCAG 2, level AA
        grounds.append(ground)
    assert grounds[0] > 0.8 > 0.2 > grounds[1]


def test_the_page_needs_nothing_else(picture):
    """What can be said without a browser: no addresses, all data inside, nothing left to fill in."""
    written = html_page(picture)
    assert not re.search(r"(src|href)=|@import|url\(|https?://", written)
    assert not re.search(r"\$\w", written)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', written, re.S)[1]
    assert json.loads(data) == json.loads(json.dumps(as_data(picture)))


def test_names_from_files_cannot_break_the_page(picture):
    written = html_page(replace(picture, model="<script>alert(1)</script> & $style"))
    assert "<script>alert" not in written
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; $style" in written
