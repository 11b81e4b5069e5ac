"""Metrics, traces and logs of what is served."""
