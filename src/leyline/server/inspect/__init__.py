"""A look inside: what became of each turn of a session, for people.

records.py    what is kept of turns, its bounds, and who is told of changes
messages.py   which tokens of a prompt belong to which message
view.py       a turn as it is shown
routes.py     /v1/leyline/sessions, /v1/leyline/turns, /v1/leyline/events
page.py       /leyline: files of the folder page/, without data
"""
