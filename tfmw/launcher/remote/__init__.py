"""Attempts on several machines, shared by supervisors of hosts and controllers of engines.

One process leads an attempt, and processes on other machines run its tasks for it. Read
`remote_attempt.py` first: the end of an attempt. `messages.py` has the messages between the two,
and `links.py` their authenticated connections. `tasks.py` runs the tasks of one machine.

May import: `tfmw.launcher` and the packages below it.
"""
