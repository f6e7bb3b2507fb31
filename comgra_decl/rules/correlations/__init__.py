"""Correlations between metrics, findings, types of execution and samples of a run."""

from comgra_decl.rules.correlations.correlate import correlate, diagnose_and_correlate
from comgra_decl.rules.correlations.correlation import Correlation, Side

__all__ = ["Correlation", "Side", "correlate", "diagnose_and_correlate"]
