"""Sphinx: the API from docstrings, the rest from Markdown. Build with `make docs`."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

project = "treeattn"
copyright = "The treeattn developers"
release = metadata.version(project)
urls = dict(line.split(", ", 1) for line in metadata.metadata(project).get_all("Project-URL", []))
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click", "sphinx_copybutton"]
copybutton_prompt_text = "$ "
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"
html_theme_options = {
    "footer_icons": [{"name": name, "url": url, "html": name, "class": ""} for name, url in urls.items()]
}
html_static_path = ["_static"]
html_css_files = ["treeattn.css"]
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # CATALOG, not everything that stands in it
autodoc_typehints = "description"
nitpick_ignore_regex = [("py:class", ".*")]  # types are words with shapes: links where they are on a page
myst_heading_anchors = 3
# Docstrings name arguments and results in `single quotes` that are not always objects.
default_role = "code"


def pictures_follow_the_theme(app: Sphinx, document: nodes.document) -> None:
    """A picture that does not know dark screens lies on a light card; drawings with both themes need none."""
    page = Path(document["source"]).parent
    for image in document.findall(nodes.image):
        path = page / image["uri"]
        if path.is_file() and "prefers-color-scheme" not in path.read_text(errors="replace"):
            image["classes"].append("one-theme")


def shapes_are_no_links(app: Sphinx, document: nodes.document) -> None:
    """`[batch, heads]` in a type is words, whatever attributes are called so."""
    for link in list(document.findall(addnodes.pending_xref)):
        if link["reftype"] == "class" and re.fullmatch(r"[a-z_]+", link["reftarget"]):
            link.replace_self(link.children)


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", pictures_follow_the_theme)
    app.connect("doctree-read", shapes_are_no_links)
