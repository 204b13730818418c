"""A newcomer's first questions: each is answered within two clicks from the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.cluster import ROOT

QUESTIONS = {  # question: (page, words of the answer)
    "How do I install it?": ("docs/start/install.md", "pip install ."),
    "Which systems and versions does it need?": (
        "docs/start/install.md",
        "Linux, Python 3.11 to 3.13",
    ),
    "How do I change my script?": (
        "docs/start/one-machine.md",
        "+history = tfmw.fit(model, dataset, epochs=5)",
    ),
    "Does it run on my two GPUs?": (
        "docs/howto/gpus.md",
        "one process, all GPUs of this machine",
    ),
    "How do I use two machines?": ("docs/start/two-machines.md", "tfmw run --hosts h0,h1 train.py"),
    "My data is in TFRecords on a bucket.": (
        "docs/howto/load-data.md",
        "interleave(tf.data.TFRecordDataset",
    ),
    "How do I resume?": ("docs/howto/backups.md", "tfmw.fit(model, dataset, epochs=50, backup_dir"),
    "What happens if a machine dies?": ("docs/howto/elastic-hosts.md", "--min-hosts"),
    "What does it cost?": ("docs/explain/benchmarks.md", "the peak memory of a worker"),
    "Are the results those of one process?": ("docs/explain/equivalence.md", "Not equal, and why"),
    "How do I run it on Slurm?": ("docs/howto/schedulers.md", "sbatch"),
    "I come from MultiWorkerMirroredStrategy.": (
        "docs/howto/migrate/multi-worker-mirrored.md",
        "strategy.scope()",
    ),
    "It hangs.": ("docs/howto/debug.md", "tfmw status"),
    "How do I serve the model?": ("docs/howto/export.md", "tf.saved_model.load"),
    "Is it safe on my network?": ("docs/explain/security-model.md", "no authentication"),
    "Is it faster than model.fit on my laptop?": (
        "README.md",
        "both of which one plain Keras process has",
    ),
    "Can my script stay as it is?": (
        "docs/howto/keras-scripts.md",
        "tfmw run --workers 2 train.py",
    ),
    "Where are my checkpoints?": ("docs/howto/faq.md", "as `step_000000001200`"),
    "How large are they?": ("docs/howto/faq.md", "with Adam three times the size"),
    "How do I keep the best model?": ("docs/howto/faq.md", "save_best_only=True"),
    "Why does the same command train nothing?": ("docs/howto/faq.md", "complete: 5 epochs; delete"),
    "How do I debug with pdb?": ("docs/howto/faq.md", "python -m pdb train.py"),
    "What do I do on a Mac?": ("README.md", "docker run -it"),
    "How do I start 16 hosts?": ("docs/howto/elastic-hosts.md", "pdsh -R ssh"),
    "Do my machines have to be equal?": ("docs/howto/faq.md", "when the slowest worker has done"),
    "Do pandas and generators work?": ("docs/howto/faq.md", "frame[columns].to_numpy()"),
    "How do I use it in a notebook?": ("docs/howto/notebooks.md", "workers=2"),
    "Which learning rate do I use?": ("docs/howto/faq.md", "the global batch"),
    "How do I use two machines with 8 GPUs each?": (
        "docs/howto/gpus.md",
        "tfmw check --hosts h0,h1",
    ),
    "What does a backup cost?": ("docs/howto/backups.md", "stopped for 66 ms"),
    "Is there a Dockerfile?": ("docs/howto/containers.md", "docker build -t tfmw ."),
    "How do I stop in my train_step?": ("docs/howto/debug.md", "run_eagerly=True"),
    "What is a replica?": ("docs/reference/glossary.md", "one copy of the model on one device"),
    "Who maintains it?": ("docs/reference/support.md", "maintained by its contributors"),
    "How do I cite it?": ("README.md", "(CITATION.cff) how to cite"),
    "Does Dropout give the same numbers?": ("README.md", "each replica draws its own masks"),
    "How do I log to MLflow?": ("docs/howto/callbacks.md", "with mlflow.start_run():"),
    "Can I use KerasTuner?": ("docs/howto/tune.md", "tuner.search(images"),
    "I come from Horovod.": ("docs/howto/migrate/horovod.md", "`hvd.rank()`, `hvd.size()`"),
    "I come from Ray Train.": ("docs/howto/migrate/horovod.md", "`ScalingConfig(num_workers=2)`"),
    "How do I run it on Kubernetes?": ("docs/howto/kubernetes.md", "kubectl apply"),
}


def links(page: Path) -> set[Path]:
    """Pages of this repository that a page links to, itself included."""
    targets = re.findall(r"\]\(([^)#\s:]+\.(?:md|ipynb))(?:#[^)\s]*)?\)", page.read_text())
    return {page} | {(page.parent / target).resolve() for target in targets}


def test_two_clicks_do_not_reach_everything():
    """The test below can fail."""
    assert ROOT / "docs/contribute/code.md" not in links(ROOT / "README.md")


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_answer_is_within_two_clicks(question):
    page, words = QUESTIONS[question]
    first = links(ROOT / "README.md")
    second = {goal for link in first if link.suffix == ".md" for goal in links(link)}
    assert ROOT / page in second, page
    assert words in (ROOT / page).read_text(), f"{page}: {words}"
