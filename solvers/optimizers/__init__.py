"""Optimizers that torch does not have in this form, and what a step does about a delay."""
