"""Races between optimizers: the parts of scripts.optim_race."""
