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
    "tfmw/data/datasets/*/ATTRIBUTION.md",
]
exclude_patterns = [".*", "build", "tests", "bench", "recipes", "**/__pycache__"]

# The groups of the navigation, by Diataxis. GitHub shows README.md, too: it has none.
navigation = {
    "Get started": [
        "docs/start/install",
        "docs/start/one-machine",
        "docs/start/two-machines",
        "docs/start/concepts",
        "docs/howto/faq",
    ],
    "How-to: train": [
        "docs/howto/keras-scripts",
        "docs/howto/load-data",
        "docs/howto/load-data-at-scale",
        "docs/howto/callbacks",
        "docs/howto/gpus",
        "docs/howto/custom-loops",
        "docs/howto/notebooks",
        "docs/howto/export",
        "docs/howto/predictions",
        "docs/howto/tune",
    ],
    "How-to: failures": [
        "docs/howto/backups",
        "docs/howto/restarts",
        "docs/howto/elastic-hosts",
    ],
    "How-to: clusters": [
        "docs/howto/jobs",
        "docs/howto/schedulers",
        "docs/howto/kubernetes",
        "docs/howto/containers",
        "docs/howto/slow-networks",
    ],
    "How-to: parameter servers": [
        "docs/howto/parameter-servers",
        "docs/howto/dynamic-embeddings",
    ],
    "How-to: observe": [
        "docs/howto/monitor",
        "docs/howto/debug",
        "docs/howto/tune-performance",
    ],
    "How-to: migrate": [
        "docs/howto/migrate/overview",
        "docs/howto/migrate/multi-worker-mirrored",
        "docs/howto/migrate/horovod",
        "docs/howto/migrate/parameter-server-strategy",
        "docs/howto/migrate/tf1",
    ],
    "How-to: troubleshoot": [
        "docs/howto/troubleshoot/overview",
        "docs/howto/troubleshoot/start",
        "docs/howto/troubleshoot/data",
        "docs/howto/troubleshoot/model",
        "docs/howto/troubleshoot/run",
    ],
    "Notebooks": [
        "notebooks/first_fit",
        "notebooks/before_and_after",
        "notebooks/many_workers",
        "notebooks/data_from_files",
        "notebooks/custom_training",
        "notebooks/transfer_learning",
        "notebooks/speed_up",
        "notebooks/reading_a_benchmark",
        "notebooks/slow_network",
        "notebooks/surviving_a_crash",
        "notebooks/two_hosts",
        "notebooks/parameter_servers",
        "notebooks/large_tables",
        "notebooks/on_a_cluster",
    ],
    "Reference": [
        "docs/reference/training",
        "docs/reference/cluster",
        "docs/reference/data",
        "docs/reference/command-line",
        "docs/reference/known-limits",
        "docs/reference/glossary",
        "docs/reference/support",
        "SECURITY",
        "CHANGELOG",
    ],
    "Explanation": [
        "docs/explain/how-it-works",
        "docs/explain/equivalence",
        "docs/explain/examples",
        "docs/explain/failure-model",
        "docs/explain/leader-election",
        "docs/explain/security-model",
        "docs/explain/benchmarks",
        "docs/explain/comparison",
    ],
    "Contribute": [
        "CONTRIBUTING",
        "docs/contribute/code",
        "The digits <tfmw/data/datasets/digits/ATTRIBUTION>",
    ],
}

# Pages of earlier versions of the site, and the pages that open in their place.
moved = {
    "docs/backups": "docs/howto/backups",
    "docs/clusters": "docs/start/two-machines",
    "docs/compatibility": "docs/reference/support#public-names",
    "docs/contribute/dependencies": "docs/contribute/code#dependencies",
    "docs/contribute/engines": "docs/contribute/code#add-an-engine",
    "docs/contribute/modules": "docs/contribute/code#modules",
    "docs/contribute/upstream": "docs/contribute/code#a-hook-for-keras",
    "docs/custom-loops": "docs/howto/custom-loops",
    "docs/dependencies": "docs/contribute/code#dependencies",
    "docs/engines": "docs/howto/jobs",
    "docs/equivalence": "docs/explain/equivalence",
    "docs/explain/gradient-all-reduce": "docs/explain/how-it-works#gradient-all-reduce",
    "docs/explain/guarantees": "docs/reference/support#guarantees",
    "docs/explain/survey": "docs/explain/examples#losses-metrics-optimizers-and-layers",
    "docs/export": "docs/howto/export",
    "docs/failures": "docs/explain/failure-model",
    "docs/how-it-works": "docs/explain/how-it-works",
    "docs/howto/clouds": "docs/howto/schedulers",
    "docs/howto/debug-hangs": "docs/howto/debug#a-run-that-hangs",
    "docs/howto/debug-scripts": "docs/howto/debug",
    "docs/howto/gpu-machines": "docs/howto/gpus#two-machines-with-gpus",
    "docs/howto/keep-workers": "docs/howto/notebooks#keep-workers-between-calls",
    "docs/howto/keras-distribution": "docs/howto/keras-scripts#scripts-that-use-keras-distribution",
    "docs/howto/migrate/estimator": "docs/howto/migrate/tf1#estimator",
    "docs/howto/migrate/ray-train": "docs/howto/migrate/horovod#ray-train",
    "docs/howto/migrate/tf-keras": "docs/howto/migrate/multi-worker-mirrored#legacy-keras-2",
    "docs/howto/mixed-precision": "docs/howto/gpus#mixed-precision-and-gradients-in-16-bits",
    "docs/howto/optimizer-state": "docs/howto/tune-performance#shard-the-optimizer-state",
    "docs/howto/preemption": "docs/howto/restarts#handle-preemption",
    "docs/howto/ray": "docs/howto/jobs",
    "docs/howto/recipes": "docs/start/one-machine#adapt-a-recipe",
    "docs/howto/sharded-embeddings": "docs/howto/parameter-servers#shard-embeddings-over-servers",
    "docs/howto/slurm": "docs/howto/schedulers",
    "docs/howto/spark": "docs/howto/jobs",
    "docs/howto/track": "docs/howto/callbacks#track-a-run-with-mlflow-w-b-or-tensorboard",
    "docs/howto/troubleshoot/servers": "docs/howto/troubleshoot/run#parameter-servers",
    "docs/howto/troubleshoot/state": "docs/howto/troubleshoot/run#backups-and-exports",
    "docs/howto/troubleshoot/tensorflow": "docs/howto/troubleshoot/overview#messages-of-tensorflow",
    "docs/migration": "docs/howto/migrate/overview",
    "docs/modules": "docs/contribute/code#modules",
    "docs/monitoring": "docs/howto/monitor",
    "docs/parameter-servers": "docs/howto/parameter-servers",
    "docs/performance": "docs/explain/benchmarks",
    "docs/promises": "docs/reference/support#guarantees",
    "docs/reference/callbacks": "docs/reference/training#callbacks",
    "docs/reference/compatibility": "docs/reference/support#public-names",
    "docs/reference/engines": "docs/reference/cluster#engines-and-jobs",
    "docs/reference/environment": "docs/reference/command-line#environment-variables",
    "docs/reference/errors": "docs/reference/command-line#errors",
    "docs/reference/exit-statuses": "docs/reference/command-line#errors",
    "docs/reference/export": "docs/reference/training",
    "docs/reference/layers": "docs/reference/training",
    "docs/restarts": "docs/howto/restarts",
    "docs/schedulers": "docs/howto/schedulers",
    "docs/stands-still": "docs/howto/debug#a-run-that-hangs",
    "docs/start/choose-a-strategy": "docs/start/concepts#choose-a-strategy",
    "docs/trackers": "docs/howto/callbacks#track-a-run-with-mlflow-w-b-or-tensorboard",
    "docs/training": "docs/howto/load-data",
    "docs/troubleshooting": "docs/howto/troubleshoot/overview",
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
html_search_scorer = str(ROOT / "docs" / "scorer.js")
html_copy_source = False
html_show_sphinx = False
