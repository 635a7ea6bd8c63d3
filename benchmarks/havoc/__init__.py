"""Real faults on real processes, for ``benchmarks.chaos`` and ``benchmarks.recovery``.

plans     what strikes which world, and when, from a seed (pure)
site      a controller and its hosts, as their users start them
proxy     a network between them that can be cut, silenced and slowed
strikes   how each fault is done, and whether it had its effect
world     one world, from its first process to its last
expected  who must be dead of what, and how a life may end, after what was done to it (pure)
exact     what every sample, every rank's parameters and the checkpoint must be (pure)
evidence  what a world left behind: database, files, processes, memory
"""
