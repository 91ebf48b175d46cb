"""A hook of MkDocs (mkdocs.yml): links that leave docs/ work in the site as they do in the repository's web view.

Pages of other folders that docs/ links to become pages of the site, below `repository/`. Links to all else in the
repository, such as source files, become plain text there. A link to a file that does not exist ends a strict build.
"""

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs"
PREFIX = "repository"
_LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)")
_CODE = re.compile(r"^(```.*?^```|    .*?$)|`[^`]*`", re.DOTALL | re.MULTILINE)
_log = logging.getLogger(f"mkdocs.hooks.{Path(__file__).stem}")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Adds the pages of other folders that pages of docs/ link to. Those that only they link to are not added."""
    for page in sorted((ROOT / DOCS).glob("*.md")):
        for source in _other_pages(PurePosixPath(DOCS, page.name), page.read_text()):
            if files.get_file_from_path(_site_path(source)) is None:
                text = (ROOT / source).read_text()
                left_out = InclusionLevel.NOT_IN_NAV
                files.append(File.generated(config, _site_path(source), content=text, inclusion=left_out))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Rewrites the page's links. Code is left alone."""
    source = _source_of(page.file.src_uri)
    pieces, end = [], 0
    for code in _CODE.finditer(markdown):
        pieces += [_rewritten(markdown[end : code.start()], source, files), code[0]]
        end = code.end()
    return "".join((*pieces, _rewritten(markdown[end:], source, files)))


def _rewritten(text: str, source: PurePosixPath, files: Files) -> str:
    def rewrite(link: re.Match[str]) -> str:
        found = _target_of(source, link["target"])
        if found is None:
            return link[0]
        target, anchor = found
        if not (ROOT / target).exists():
            _log.warning("%s links to %s, which does not exist", source, target)
        site_path = _site_path(_page_of(target))
        if files.get_file_from_path(site_path) is None:
            return link["text"]
        base = _site_path(source).rpartition("/")[0] or "."
        return f"[{link['text']}]({os.path.relpath(site_path, base)}{anchor})"

    return _LINK.sub(rewrite, text)


def _other_pages(source: PurePosixPath, text: str) -> Iterator[PurePosixPath]:
    for link in _LINK.finditer(text):
        found = _target_of(source, link["target"])
        page = source if found is None else _page_of(found[0])
        if page.suffix == ".md" and page.parts[0] != DOCS and (ROOT / page).exists():
            yield page


def _target_of(source: PurePosixPath, link: str) -> tuple[PurePosixPath, str] | None:
    """The file or folder of a relative link, from the repository's root, and its anchor. None: no such link."""
    path, hash_sign, anchor = link.partition("#")
    if not path or "://" in path or path.startswith(("/", "mailto:")):
        return None
    return PurePosixPath(os.path.normpath(source.parent / path)), hash_sign + anchor


def _page_of(target: PurePosixPath) -> PurePosixPath:
    """Of a folder the web view shows the README."""
    return target / "README.md" if (ROOT / target).is_dir() else target


def _site_path(source: PurePosixPath) -> str:
    """Where a file of the repository is in the site. A README becomes the page of its folder."""
    return str(source.relative_to(DOCS) if source.parts[0] == DOCS else PREFIX / source)


def _source_of(site_path: str) -> PurePosixPath:
    path = PurePosixPath(site_path)
    return path.relative_to(PREFIX) if path.parts[0] == PREFIX else PurePosixPath(DOCS, path)
