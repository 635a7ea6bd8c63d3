"""A rank of ``benchmarks.collective``: a model's vectors on a device, a session of the worker's own classes, and beside
it a process group of torch's. A line on stdin, JSON with ``act``, is answered by a line.

``model`` lays out and says how the ranks talk. ``ours``, ``bare`` and ``torch`` repeat and give the moments (monotonic
clock, seconds) at which each repetition began and ended here; each begins at a barrier, with the device at rest.
``memory`` does rounds and notes what they leave.
"""

# The body follows with the worker's side of the collective plane.
