"""The agent's exit codes, for scripts and service managers (conventions 2.4)."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What ended the agent."""

    OK = 0
    """the run is done, or the operator ended the agent"""
    ERROR = 1
    """the run failed, or something on this host did"""
    USAGE = 2
    """the command line cannot be followed"""
    REJECTED = 3
    """the controller does not take this host"""
    AUTHENTICATION = 4
    """the join token is missing or wrong"""
    LOST = 5
    """the controller could not be reached, or was lost"""
