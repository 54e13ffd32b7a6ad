"""Sphinx: the API from docstrings, the rest from Markdown. Build with `make docs`."""

project = "treeattn"
copyright = "The treeattn developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # CATALOG, not everything that stands in it
autodoc_typehints = "none"
myst_heading_anchors = 3
# Docstrings name arguments and results in `single quotes` that are not always objects.
default_role = "code"
