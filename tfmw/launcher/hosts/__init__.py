"""Several hosts: `tfmw run --hosts h0,h1,h2 --max-restarts N`, the same command on each of them.

The process of each host is a supervisor: it starts, watches and ends the tasks of its host, as the
launcher does on one machine (`tfmw.launcher.attempt`). One supervisor leads. It decides who takes
part in an attempt, starts it, and decides what follows when it ends.

Read `supervisor.py` and `leader.py` first: what a supervisor does, and what the one that leads
does, and which task runs on which host. Events and the time come in, and they call the links, the
lock and the tasks that they are given, so tests run them in simulated time.
`tfmw.launcher.remote.messages` is what supervisors send each other, over the connections of
`host_links.py`.

`lease.py` decides who leads: a lock in a shared directory, or an object in a bucket, which also has
the `Record`, with the number of the last attempt. `launch.py` checks what
the user asks for. `supervisor_loop.py` is the process around all that, with the tasks of this host
(`tfmw.launcher.remote.tasks`).

May import: `tfmw.launcher.remote`, `tfmw.launcher` and what is below them.
"""
