"""Names for writing rules, both built-in rules and your own.

```python
import numpy as np

from comgra_decl.rules.api import Factor, Mask, Measured, Patient, Scene, SlotRule, Window
```

`docs/findings.md` shows how to write a rule.
"""

from pydantic import Field

from comgra_decl.records import (
    EARLIER_STEP,
    GRAD_SCALE,
    MODES,
    SKIPPED_STEP,
    SlotInfo,
    SlotKey,
    Structure,
)
from comgra_decl.rules.base import (
    Count,
    Factor,
    Fraction,
    Measured,
    Patient,
    Positive,
    Rule,
    RuleParameters,
    SampledParameters,
    SampledRule,
    Scene,
    Seen,
    Share,
    SlotRule,
    per_run,
    trained_models,
)
from comgra_decl.rules.calls import (
    BINARY_LOGITS,
    CLASSIFICATION,
    ELEMENTWISE,
    LOGITS_OF_CLASSES,
    PROBABILITIES,
    LossCall,
)
from comgra_decl.rules.finding import MOST_OTHERS, Finding, Place, Severity
from comgra_decl.rules.graph import (
    classes_of,
    combined,
    computed_from_targets,
    place_of,
    prediction_of,
    predictions,
    predictions_and_logits,
    reaching_loss,
    same_shape_edges,
    single_sources,
    sources_of,
    target_of,
    target_pairs,
)
from comgra_decl.rules.loss_curve import EVALUATION_TYPES, Curve, CurveRule, LossRule, is_validation
from comgra_decl.rules.memory import (
    NO_SLOTS,
    Bools,
    ClassCounts,
    Early,
    First,
    Largest,
    Previous,
    Slots,
    Streak,
    grown,
    row_quantile,
)
from comgra_decl.rules.settings import (
    decays,
    lower_decay,
    lower_rate,
    normalises,
    raise_rate,
)
from comgra_decl.rules.table import RECTIFIERS, Mask, SlotTable, is_gradient
from comgra_decl.rules.window import VARYING, Numbers, Window
from comgra_decl.spec.base import Int, Number

__all__ = [
    "BINARY_LOGITS",
    "CLASSIFICATION",
    "EARLIER_STEP",
    "ELEMENTWISE",
    "EVALUATION_TYPES",
    "GRAD_SCALE",
    "LOGITS_OF_CLASSES",
    "MODES",
    "MOST_OTHERS",
    "NO_SLOTS",
    "PROBABILITIES",
    "RECTIFIERS",
    "SKIPPED_STEP",
    "VARYING",
    "Bools",
    "ClassCounts",
    "Count",
    "Curve",
    "CurveRule",
    "Early",
    "Factor",
    "Field",
    "Finding",
    "First",
    "Fraction",
    "Int",
    "Largest",
    "LossCall",
    "LossRule",
    "Mask",
    "Measured",
    "Number",
    "Numbers",
    "Patient",
    "Place",
    "Positive",
    "Previous",
    "Rule",
    "RuleParameters",
    "SampledParameters",
    "SampledRule",
    "Scene",
    "Seen",
    "Severity",
    "Share",
    "SlotInfo",
    "SlotKey",
    "SlotRule",
    "SlotTable",
    "Slots",
    "Streak",
    "Structure",
    "Window",
    "classes_of",
    "combined",
    "computed_from_targets",
    "decays",
    "grown",
    "is_gradient",
    "is_validation",
    "lower_decay",
    "lower_rate",
    "normalises",
    "per_run",
    "place_of",
    "prediction_of",
    "predictions",
    "predictions_and_logits",
    "raise_rate",
    "reaching_loss",
    "row_quantile",
    "same_shape_edges",
    "single_sources",
    "sources_of",
    "target_of",
    "target_pairs",
    "trained_models",
]
