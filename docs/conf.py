"""Sphinx's settings: `make docs` builds the pages into out/site, without the network."""

from __future__ import annotations

import sys
from pathlib import Path

import mpimesh

sys.path.insert(0, str(Path(__file__).parent))
import house

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
exclude_patterns = ["inventories"]
nitpicky = True
pygments_style = "friendly"

# -- pages -----------------------------------------------------------------------------------------

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

# The map of the library, of the imports as they are.
house.write(Path(__file__).parent / "_static" / "house.svg")

# -- the reference ---------------------------------------------------------------------------------

autosummary_generate = True
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True

# Text of the first format of inventories, with the names that the docstrings use and no others, so
# that a build needs no network.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "inventories/python.txt"),
    "numpy": ("https://numpy.org/doc/stable", "inventories/numpy.txt"),
    "mpi4py": ("https://mpi4py.readthedocs.io/en/stable", "inventories/mpi4py.txt"),
}

# -- the look --------------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = "mpimesh"
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
    "pygments_light_style": "friendly",
    "pygments_dark_style": "github-dark",
}
