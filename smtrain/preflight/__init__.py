"""What is looked at before a job is paid for: every fault in one pass, each with its remedy."""

from smtrain.preflight.api import check
from smtrain.preflight.findings import Finding, Level, Report

__all__ = ["Finding", "Level", "Report", "check"]
