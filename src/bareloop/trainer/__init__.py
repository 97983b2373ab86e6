"""The loop: batches to optimizer steps. `steps` for a loop of one's own, `lean` and `Trainer` for transformers' Trainer.

Imports neither `bareloop.data` nor `bareloop.swarm` nor the clinic's rooms.
"""
