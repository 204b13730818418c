"""Found in place of matplotlib, whose import by Keras is a sixth of the start of a process."""

raise ImportError("processes of tests do without it")
