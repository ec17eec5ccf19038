"""Agents that solve tasks, with and without edits of their context.

stats.py      how sure a solve rate is
arms.py       what each arm makes of a request
endpoint.py   a chat completion, and what it cost
gym.py        debug-gym in an environment of its own
gym_child.py  what runs there, a file by itself
scripted.py   answers that no model gave
episode.py    one task, from its first call to its end
store.py      episodes as files, so that a run can go on
numbers.py    from episodes to numbers
report.py     numbers as tables, JSON and Markdown
plots.py      and as a picture
run.py        all of it, in order

`python -m leyline.evals` runs the scripted answers on a server of its own.
"""
