"""Which signals ask a process of this host to leave."""

from __future__ import annotations

import signal


def leaving_signals() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM and SIGHUP; SIGHUP not where whoever started us said that it means nothing, as nohup does."""
    asked = (signal.SIGINT, signal.SIGTERM)
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*asked, signal.SIGHUP)
