"""Analyses of trained models, and of training steps on machines that are not here."""
