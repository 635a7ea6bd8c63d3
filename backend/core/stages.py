"""Where a round's time went, in stages that follow each other and add up to the whole."""

from __future__ import annotations

from backend.core.cycle import OpenedRound


def stages(opened: OpenedRound, now: float) -> dict[str, float]:
    """Seconds by stage of a round whose last acknowledgement is here.

    ``pack``: the slowest rank has its values in the arena. ``declare``: the last contribution is declared. ``up``: the
    last element of one has come; folding and nearly all of summing happen meanwhile. Nothing where memory is shared.
    ``sum``: the last sum. ``down``: the last of the update, and the commit, at every rank. ``load``: the slowest rank
    takes the consensus in.
    """
    assert opened.finished is not None, "only a committed round can be closed"
    finished, acks = opened.finished, opened.acks.values()
    whole = now - opened.opened_at
    pack = max((ack.pack_ms / 1000 for ack in acks), default=0.0)
    load = max((ack.load_ms / 1000 for ack in acks), default=0.0)
    return {
        "pack": pack,
        "declare": max(0.0, finished.declared - pack),
        "up": finished.arrived - finished.declared,
        "sum": finished.seconds - finished.arrived,
        "down": max(0.0, whole - finished.seconds - load),
        "load": load,
    }
