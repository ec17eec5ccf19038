"""HTTP for the embedded engine.

app.py           the application: what is where, and in which order
run.py           uvicorn around it
chat.py, completions.py, messages.py, sessions.py, health.py   the routes, by surface
prepare.py       a checked request to the engine's words
text.py          chat template and tokenizer
inspect/         a look inside: the page /leyline and what it shows
stream.py        the engine's events on the event loop, and as an answer
auth.py          API keys; whose a session is
limits.py        sizes of bodies, open requests of a key
metrics.py       what /metrics shows
errors.py        every error as the OpenAI API has it, or Anthropic's
"""
