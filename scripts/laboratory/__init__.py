"""Races between optimizers and families of runs: what scripts.optim_race and scripts.scaling do."""
