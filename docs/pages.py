"""A hook of mkdocs: the Markdown files at other places in the repository become pages of the site as well.

What a page links to, and is no page itself, such as a recipe, is copied into the site.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "recipes/README.md": "recipes.md",
    "SUPPORTED_MODELS.md": "supported_models.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""File in the repository -> page of the site. All pages lie in one folder."""

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and what they and those in docs/ link to."""
    sources = [*PAGES, *(file.src_uri for file in files.documentation_pages())]
    for source in sources:
        path = ROOT / source if source in PAGES else Path(config.docs_dir, source)
        text = path.read_text(encoding="utf-8")
        uri = PAGES.get(source, source)
        if uri in files.src_uris:
            files.remove(files.src_uris[uri])
        page, linked = _moved(text, path.parent)
        files.append(File.generated(config, uri, content=page))
        for name in linked - files.src_uris.keys():
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def _moved(text: str, folder: Path) -> tuple[str, set[str]]:
    """The text with links from where its page will be, and the files that it links to."""
    linked = set()

    def link(match: re.Match[str]) -> str:
        name = os.path.relpath(folder / match[1], ROOT)
        name = PAGES.get(name, name.removeprefix("docs/"))
        if (ROOT / name).is_file():
            linked.add(name)
        return name

    return LINK.sub(link, text), linked
