"""Sphinx's settings: `make docs` builds the site from the pages where they are in the repository.

The source folder is the repository's root, so that a link between README.md, docs/, notebooks/ and
recipes/ is the same on GitHub and on the site.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_extensions")]

project = "tfmw"
project_copyright = "the authors of tfmw, Apache-2.0"
html_title = "tfmw"

extensions = [
    "myst_nb",  # Markdown pages, and notebooks as they were committed
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # docstrings in Google's style
    "tfmw_pages",  # this project's own: diagrams, help of commands, checks of the documentation
]

root_doc = "README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**.md",
    "notebooks/*.ipynb",
    "tfmw/datasets/*/ATTRIBUTION.md",
]
exclude_patterns = [".*", "build", "tests", "bench", "recipes", "**/__pycache__"]

# The groups of the navigation. README.md, the first page, has none because GitHub shows it too.
navigation = {
    "Guides": [
        "docs/training",
        "docs/custom-loops",
        "docs/trackers",
        "docs/stands-still",
        "docs/monitoring",
        "docs/clusters",
        "docs/engines",
        "docs/schedulers",
        "docs/backups",
        "docs/parameter-servers",
        "docs/export",
        "docs/performance",
        "docs/migration",
        "docs/troubleshooting",
    ],
    "Notebooks": [
        "notebooks/first_fit",
        "notebooks/many_workers",
        "notebooks/on_a_cluster",
        "notebooks/surviving_a_crash",
        "notebooks/parameter_servers",
        "notebooks/large_tables",
        "notebooks/reading_a_benchmark",
    ],
    "Promises": [
        "docs/promises",
        "docs/equivalence",
        "docs/failures",
        "docs/restarts",
    ],
    "Reference": [
        "docs/reference/training",
        "docs/reference/cluster",
        "docs/reference/engines",
        "docs/reference/data",
        "docs/reference/callbacks",
        "docs/reference/layers",
        "docs/reference/export",
        "docs/reference/errors",
        "docs/reference/command-line",
        "docs/compatibility",
        "SECURITY",
        "CHANGELOG",
    ],
    "Development": [
        "docs/how-it-works",
        "CONTRIBUTING",
        "docs/modules",
        "docs/dependencies",
        "The digits <tfmw/datasets/digits/ATTRIBUTION>",
    ],
}

nb_execution_mode = "off"  # `make notebooks` runs them, and tests/ asserts what they show
myst_heading_anchors = 4  # anchors as on GitHub
myst_fence_as_directive = ["mermaid"]

default_role = "code"  # in docstrings `name` is code, as in Markdown
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_param = False  # arguments that share a description stay together
napoleon_use_rtype = False

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tfmw.css"]
html_copy_source = False
html_show_sphinx = False
