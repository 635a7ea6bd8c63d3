"""The worker side: one agent per host, its relay, and one training process (rank) per device.

``from worker import Job`` is all that a training script needs. Importing this package imports no torch.
"""

from worker.job import Job, JobError

__all__ = ["Job", "JobError"]
