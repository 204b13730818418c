"""Attempts on several machines: what supervisors of hosts and engines' controllers share.

One process leads an attempt, and processes on other machines run its tasks for it. Read
`remote_attempt.py` first: how an attempt ends. `messages.py` is what the two send each other, over
authenticated connections: `links.py`. `tasks.py` runs the tasks of one machine.

May import: `tfmw.launcher` and what is below it.
"""
