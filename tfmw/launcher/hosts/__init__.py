"""Several hosts: `tfmw run --hosts h0,h1,h2 --max-restarts N`, the same command on each of them.

The process of each host is a supervisor: it starts, watches and ends the tasks of its host, as the
launcher does on one machine (`tfmw.launcher.attempt`). One supervisor leads. It selects the hosts
of an attempt, starts it, and decides about the next one when it ends.

Read `supervisor.py` and `leader.py` first: the state machines of a supervisor and of the one that
leads, which also places tasks on hosts. Their methods take events and the time, and call the links,
the lock and the tasks that they were given. So tests run them in simulated time.
`tfmw.launcher.remote.messages` has the messages between supervisors, sent over the connections of
`host_links.py`.

`lease.py` elects the leader by a lock in a shared directory, or an object in a bucket. The lock
also has the `Record`, with the number of the last attempt. `launch.py` validates the user's
arguments. `supervisor_loop.py` is the main loop of the process, with the tasks of this host
(`tfmw.launcher.remote.tasks`).

May import: `tfmw.launcher.remote`, `tfmw.launcher` and the packages below them.
"""
