"""Algorithms that users wrote in Bagua's hooks, on Gossamer's engine.

algorithm.py is the engine's view of such an algorithm: it turns the moments of a step into calls of Bagua's hooks.
The engine counts gradients, steps and backwards, as it does for every algorithm. Two rules of Bagua are not the
engine's, and are kept here:

- A bucket holds any tensors, and travels whenever they were marked ready, by a hook or by a thread of the algorithm's
  own (sequence.py). An engine's bucket holds parameters, and travels in a backward.
- An operation may outlive the backward, as a round of asynchronous averaging does (asynchronous.py). So buckets run on
  a thread with connections of their own (gossamer.engine.Background), and no backward waits for it by itself.

operations.py has the operations that a bucket runs. The names that scripts import are in gossamer.bagua.torch_api.
"""
