"""The documentation site builds without warnings, its links are valid, and the reference has all names of the SDK.
Links to other sites are not followed."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import kaveri

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}


class PageReader(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        if tag == "a" and (link := given.get("href")):
            self.links.append(link)
        elif tag in ("script", "img", "link") and (source := given.get("src") or given.get("href")):
            self.loaded.append(source)


def _build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", config, "--site-dir", site]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=200, env=ENVIRONMENT, cwd=ROOT)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.environ.get("CI", "") not in ("true", "1"):
        pytest.importorskip("mkdocs", reason="the extra [docs] is not installed")
    folder = tmp_path_factory.mktemp("site")
    built = _build(ROOT / "mkdocs.yml", folder)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_in_the_site_and_every_link_leads_somewhere(site: Path) -> None:
    pages = {path: PageReader(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} <= {path.name for path in pages}
    lost = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            target, _, anchor = link.partition("#")
            found = (path.parent / unquote(target)).resolve() if target else path
            found = found / "index.html" if found.is_dir() else found
            if not found.is_file() or (anchor and found in pages and unquote(anchor) not in pages[found].ids):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert lost == []


def test_nothing_is_loaded_from_other_sites(site: Path) -> None:
    loaded = PageReader(site / "index.html").loaded
    assert len(loaded) >= 3
    assert [source for source in loaded if re.match(r"[a-z]+:|//", source)] == []


def test_links_that_leave_docs_lead_to_the_same_pages(site: Path) -> None:
    text = (site / "plugins.html").read_text()
    assert 'href="repository/examples/plugin/index.html"' in text
    assert "Copy this folder" in (site / "repository" / "examples" / "plugin" / "index.html").read_text()


def test_the_reference_has_all_names_of_the_sdk_with_their_docstrings(site: Path) -> None:
    page = PageReader(site / "api.html")
    assert {f"kaveri.{name}" for name in kaveri.__all__} <= page.ids
    text = (site / "api.html").read_text()
    assert "idempotency key" in text
    methods = {f"kaveri.Client.{name}" for name in vars(kaveri.Client) if not name.startswith("_")}
    assert methods <= page.ids


def test_a_link_to_a_file_that_does_not_exist_ends_the_build(site: Path, tmp_path: Path) -> None:
    for name in ("scripts", "docs"):
        (tmp_path / name).mkdir()
    (tmp_path / "scripts" / "docs_site.py").write_text((ROOT / "scripts" / "docs_site.py").read_text())
    (tmp_path / "docs" / "index.md").write_text("[gone](../gone.md)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nstrict: true\nhooks: [scripts/docs_site.py]\n")
    built = _build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert built.returncode == 1
    assert "docs/index.md links to gone.md, which does not exist" in built.stderr
