"""The real core under a virtual clock, with hosts, ranks, links and faults that are played (design section 3).

``python -m simulation --help`` says what can be asked. Imports ``backend.core`` and ``wire`` only.
"""
