"""Rows to batches: packing, collators, bucketing, prefetch.

Imports neither `bareloop.trainer` nor `bareloop.swarm` nor the clinic's rooms.
"""
