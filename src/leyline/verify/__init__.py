"""Does the mechanism hold on a model? What `leyline verify` runs, one measurement a module."""
