"""Checks before a job is paid for: all faults in one pass, each with its remedy."""

from smtrain.client.findings import Finding, Level, Report

__all__ = ["Finding", "Level", "Report"]
