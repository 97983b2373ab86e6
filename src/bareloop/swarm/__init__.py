"""Gradients to averaged gradients: accumulation at native cost, alone or among peers.

Imports neither `bareloop.trainer` nor `bareloop.data` nor the clinic's rooms.
"""
