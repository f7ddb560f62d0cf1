"""Optimizers and learning rate schedules, made from settings."""
