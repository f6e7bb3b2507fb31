"""Diagnoses a training run: reports problems, where they began, and what to do about them.

```python
from comgra_decl.rules import diagnose

for finding in diagnose(comgra.open_run("runs")).findings:
    print(finding.severity, finding.place, finding.first_step, finding.message)
```
"""

from comgra_decl.rules.base import Patient, Rule, RuleParameters, Scene, SlotRule
from comgra_decl.rules.correlations import Correlation, Side, correlate, diagnose_and_correlate
from comgra_decl.rules.diagnosis import Diagnosis, diagnose, stored
from comgra_decl.rules.engine import Engine, Unchecked
from comgra_decl.rules.finding import Finding, Link, Place
from comgra_decl.rules.health import CHECKLIST, Check, health, unseen
from comgra_decl.rules.readings import Reading
from comgra_decl.rules.window import Numbers, Window

__all__ = [
    "CHECKLIST",
    "Check",
    "Correlation",
    "Diagnosis",
    "Engine",
    "Finding",
    "Link",
    "Numbers",
    "Patient",
    "Place",
    "Reading",
    "Rule",
    "RuleParameters",
    "Scene",
    "Side",
    "SlotRule",
    "Unchecked",
    "Window",
    "correlate",
    "diagnose",
    "diagnose_and_correlate",
    "health",
    "stored",
    "unseen",
]
