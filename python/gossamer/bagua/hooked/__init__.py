"""Algorithms that users wrote in Bagua's hooks, on Gossamer's engine, which counts gradients, steps and backwards.

algorithm.py turns the moments of a step into calls of Bagua's hooks. Two rules of Bagua are not the engine's:

- A bucket holds any tensors, and travels whenever they were marked ready, by a hook or by a thread of the algorithm's
  own (sequence.py). An engine's bucket holds parameters, and travels in a backward.
- An operation may outlive the backward, as a round of asynchronous averaging does (asynchronous.py). So buckets run on
  a thread with connections of their own (gossamer.engine.Background), and no backward waits for it by itself.

values.py has the memory of a bucket, operations.py what runs on it. Scripts import from gossamer.bagua.torch_api.
"""
