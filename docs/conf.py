"""Sphinx's settings: `make docs` builds the pages into out/site, without the network."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon.docstring import GoogleDocstring
from sphinx.util.nodes import make_refnode

import mpimesh
import mpimesh.settings

sys.path.insert(0, str(Path(__file__).parent))
import house
import members

project = "mpimesh"
author = "mpimesh developers"
copyright = "mpimesh developers"  # noqa: A001
version = release = mpimesh.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["inventories", "_templates"]
nitpicky = True
toc_object_entries_show_parents = "hide"
pygments_style = "a11y-high-contrast-light"

# -- pages -----------------------------------------------------------------------------------------

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

# The map of the library, of the imports as they are.
house.write(Path(__file__).parent / "_static" / "house.svg")

# -- the reference ---------------------------------------------------------------------------------

autosummary_generate = True
autosummary_context = {"tasks": members.by_task()}
autodoc_typehints = "signature"
# Signatures show long unions by their names; docstrings say what each argument takes.
autodoc_type_aliases = {
    name: name
    for name in (
        "AlgorithmName",
        "Array",
        "DTypeLike",
        "OpLike",
        "PlacementLike",
        "ScheduleLike",
        "ScheduleName",
    )
}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Classes whose objects programs get from a function or a method: their constructors are internal.
MADE_BY_THE_LIBRARY = {
    f"mpimesh.{name}"
    for name in (
        "CollectiveTensor",
        "DTensor",
        "ProcessGroup",
        "layout.RedistributionPlan",
        "schedule.Proof",
        "schedule.Timetable",
        "store.OpenedArray",
        "store.RunGuard",
        "testing.LaunchResult",
    )
}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Shapes", "params_style"), "Cost", "Threads"]
python_use_unqualified_type_names = True
# A signature that is longer has a line for each parameter.
python_maximum_signature_line_length = 80

# Text of the first format of inventories, with the names that the docstrings use and no others, so
# that a build needs no network.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "inventories/python.txt"),
    "numpy": ("https://numpy.org/doc/stable", "inventories/numpy.txt"),
    "mpi4py": ("https://mpi4py.readthedocs.io/en/stable", "inventories/mpi4py.txt"),
}

# In signatures, and with no page of their own: aliases of types, type variables, and names of
# modules below the rooms.
nitpick_ignore_regex = [
    ("py:class", r"(np|npt|_?[A-Z]\w*|mpimesh\.\w+)(\.\w+)*"),
    ("py:(mod|func|meth|attr|obj|data)", r"mpimesh\.\w+(\.\w+)+"),
    ("py:mod", r"mpimesh\.\w+|atexit"),
    ("py:.*", r"integer -- .*|numpy\.random\._.*|clock|Request\.test"),
    ("py:(func|data)", r"NULL_TRACER|CATEGORIES|Allocate|chrome_trace"),
]


def public_name(app: Sphinx, env: Any, node: Any, content: nodes.TextElement) -> Any:
    """Resolve a name that docstrings write without its room, or with the module that defines it."""
    target = node.get("reftarget", "")
    parts = target.split(".")
    objects = env.domains["py"].objects
    for count in (2, 1):
        tail = "." + ".".join(parts[-count:])
        met = sorted((name for name in objects if name.endswith(tail)), key=len)
        if met:
            entry = objects[met[0]]
            return make_refnode(
                app.builder, node["refdoc"], entry.docname, entry.node_id, content, met[0]
            )
    return None


def parse_as_method(self: GoogleDocstring) -> list[str]:
    """Read a property's docstring as a method's: what comes before a colon is no type."""
    self._what = "method"
    self._parse()
    return []


def shown_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, result: str
) -> tuple[str | None, str | None]:
    """Leave out a constructor that no program calls, and write an alias by its name.

    Sphinx writes the repr of its reference to an alias within a union.
    """
    if what == "class" and name in MADE_BY_THE_LIBRARY:
        return "", None
    plain = (
        None if text is None else re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text)
        for text in (signature, result)
    )
    return next(plain), next(plain)


def attribute_types(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Write the type of an attribute beside its name, not as a field below its text."""
    attribute = 0
    for number, line in enumerate(list(lines)):
        if line.startswith(".. attribute::"):
            attribute = number
        elif line.startswith("   :type: "):
            lines.insert(attribute + 1, lines.pop(number))


def write_settings(app: Sphinx) -> None:
    """Write the text of the settings, which is that of their module."""
    folder = Path(app.srcdir, "reference", "generated")
    folder.mkdir(exist_ok=True)
    text = inspect.cleandoc(mpimesh.settings.__doc__ or "").partition("\n\n")[2]
    (folder / "settings.txt").write_text(text)


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", shown_signature)
    app.connect("autodoc-process-docstring", attribute_types, priority=900)
    app.connect("builder-inited", write_settings)
    GoogleDocstring._parse_attribute_docstring = parse_as_method  # type: ignore[method-assign]
    app.connect("missing-reference", public_name, priority=900)


# -- the look --------------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = "mpimesh"
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/logo.svg"
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {"index": [], "install": [], "troubleshooting": []}
html_theme_options = {
    "logo": {
        "image_light": "_static/logo.svg",
        "image_dark": "_static/logo.svg",
        "text": "mpimesh",
        "alt_text": "",
    },
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "github-dark",
}
