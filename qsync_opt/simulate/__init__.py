"""Predicting what a plan does: timelines of every rank, memory over time, traces."""
