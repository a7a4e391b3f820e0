"""The documentation as a site: built strictly, offline, with pages that fetch nothing and a drawing that is ours."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import xml.etree.ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from .commands import ROOT

DRAWING = ROOT / "docs/drawings/lattice.py"


class _Fetched(HTMLParser):
    """Collects what a browser fetches when it opens a page."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.urls.append(values.get("src") or "")
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.urls.append(values.get("href") or "")


@pytest.mark.slow
def test_the_site_builds_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    # Not --quiet: it drops warnings before --strict counts them.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").glob("*.html"))
    assert {"index.html", "quickstart.html", "method.html"} <= {page.name for page in pages}
    for page in pages:
        fetched = _Fetched()
        fetched.feed(page.read_text(encoding="utf-8"))
        outside = [url for url in fetched.urls if re.match(r"(https?:)?//", url)]
        assert outside == [], f"{page.name} fetches {outside}"
    for sheet in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet.name


def test_the_drawing_is_what_its_script_draws() -> None:
    drawn = runpy.run_path(str(DRAWING))["draw"]()
    assert drawn == DRAWING.with_suffix(".svg").read_text(encoding="utf-8"), "run python docs/drawings/lattice.py"


def test_the_drawing_shows_what_its_caption_says() -> None:
    script = runpy.run_path(str(DRAWING))
    walked = script["walk"]()
    tokens = [script["CANDIDATES"][slot][candidate][0] for slot, candidate in enumerate(walked)]
    assert tokens == script["TARGET"] and script["accepted"]([0, 0, 0, 0]) == 1
    for slot in script["CANDIDATES"]:
        shares = [share for _, share in slot]
        assert shares == sorted(shares, reverse=True) and sum(shares) <= 1
    scores = [script["START"], *(row for pairs in script["PAIR"] for row in pairs)]
    assert all(abs(score) <= 8 for row in scores for score in row), "a score is sigma times a cosine"


def test_the_drawing_is_legible_in_light_and_dark_and_stands_alone() -> None:
    text = DRAWING.with_suffix(".svg").read_text(encoding="utf-8")
    root = xml.etree.ElementTree.fromstring(text)
    assert root.tag.endswith("svg") and "prefers-color-scheme: dark" in text
    assert "href" not in text and "url(" not in text
    space = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{space}title") is not None and root.find(f"{space}desc") is not None
    light, dark = text.split("@media", 1)
    for colours in (light, dark):
        ground, ink = (_colour(colours, selector) for selector in (".ground", "text"))
        assert _contrast(ground, ink) >= 7, f"{ink} on {ground}"
        for selector in (".small", ".blue", ".orange"):
            assert _contrast(ground, _colour(colours, selector)) >= 4.5, selector


def _colour(style: str, selector: str) -> str:
    found = re.search(rf"(?<![\w.-]){re.escape(selector)} \{{[^}}]*fill: (#\w{{6}})", style)
    assert found, selector
    return found[1]


def _contrast(first: str, second: str) -> float:
    """Return the WCAG contrast ratio of two colours, 1 to 21."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_links_of_the_readme_and_the_changelog_lead_somewhere() -> None:
    for name in ("README.md", "CHANGELOG.md"):
        targets = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / name).read_text(encoding="utf-8"))
        assert [target for target in targets if not (ROOT / target).exists()] == [], name
