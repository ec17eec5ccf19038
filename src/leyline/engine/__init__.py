"""The embedded engine: Transformers runs the model, Leyline owns the rows.

slots.py       which rows are free
tree.py        which cached rows continue which tokens
planes.py      the rows themselves, one plane per layer and tensor
cache.py       Transformers' cache and attention over a request's rows
request.py     what comes in, what goes out
splice.py      a request's plan, executed: share, move or copy, rotate
sampler.py     logits to tokens
text.py        tokens to text, stop strings
scheduler.py   which tokens go into the next forward pass
engine.py      the thread around it all, and what callers hold
"""
