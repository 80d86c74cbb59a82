"""The settings by which ``make docs`` builds docs/ into pages."""

from importlib import metadata
from typing import Any

from sphinx.util.nodes import make_refnode

from bench import report

project = "offload-core"
author = "the offload-core authors"
release = metadata.version("offload-core")
html_title = project
html_theme = "furo"
html_copy_source = False
html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py"]
highlight_language = "text"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
napoleon_use_rtype = False


def resolve(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Resolve a reference to one of our classes or functions, which docstrings name without their module."""
    if node.get("refdomain") != "py":
        return None
    python = env.get_domain("py")
    ends = f".{node['reftarget'].lstrip('.')}"
    found = {name: entry for name, entry in python.objects.items() if f".{name}".endswith(ends)}
    if len(found) != 1:
        return None
    [(name, entry)] = found.items()
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, name)


def illustrate(app: Any, page: str, source: list[str]) -> None:
    """Give the page of measurements its pictures. They are drawn from the results: the repository has none of them."""
    if page == "performance":
        source[0] = report.illustrated()


def setup(app: Any) -> None:
    app.connect("missing-reference", resolve)
    app.connect("source-read", illustrate)
