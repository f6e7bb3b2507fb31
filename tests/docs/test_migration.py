"""The migration guide lists every name of comgra's recorder, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import comgra_decl as comgra
from comgra_decl.spec.base import SpecModel
from comgra_decl.spec.model import Spec
from docs.reference import _models_in

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()

RECORDER = """
ComgraRecorder comgra_root_path group trial_id decision_maker_for_recordings
max_num_batch_size_to_record prefixes_for_grouping_module_parameters_visually
prefixes_for_grouping_module_parameters_in_nodes comgra_is_active
max_num_mappings_to_save_at_once_during_serialization type_of_serialization
calculate_svd_and_other_expensive_operations_of_parameters recording_is_active track_module
module_name module add_note note get_name_of_module start_batch training_step current_batch_size
type_of_execution record_all_tensors_per_batch_index_by_default override__recording_is_active
register_tensor tensor_name tensor index_of_batch_dimension is_input is_parameter is_target is_loss
recording_type record_per_batch_index node_name role_within_node is_initial_value
add_tensor_connection src sink detach_while_keeping_connection start_iteration
declare_that_all_different_types_of_execution_have_been_encountered decide_recording_of_batch
category_per_sample record_current_gradients name_of_loss_group
set_gradients_to_zero_if_not_a_parameter finish_iteration finish_batch finalize record_kpi_in_graph
kpi_group kpi_name val timepoint record_even_if_recording_is_inactive
DecisionMakerForRecordingsFrequencyPerType min_training_steps_difference exponential_backoff_factor
DecisionMakerForRecordingsHardcoded fixed_training_steps
""".split()
"""Every public name of comgra 0.11.5's recorder: methods, parameters and decision makers."""

ROWS = re.findall(r"^\| (.+?) \| (.+) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", RECORDER)
def test_every_name_of_the_recorder_is_in_the_tables(name: str) -> None:
    assert any(re.search(rf"`{name}\b", left) for left, _ in ROWS)


def keys(model: type[SpecModel], prefix: str = "") -> set[str]:
    """Returns the dotted keys of a model and its nested models; `nodes` entries as NAME."""
    found = set()
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        found.add(key)
        for part in _models_in(field.annotation):
            below = f"{key}.NAME." if (model, name) == (Spec, "nodes") else f"{key}."
            found |= keys(part, below) if part is not model else set()
    return found


def test_every_key_that_is_named_exists() -> None:
    known = keys(Spec)
    named = {
        word
        for _, right in ROWS
        for word in re.findall(r"`([a-z]+(?:\.[A-Za-z_]+)+)`", right)
        if not word.startswith("comgra.")
    }
    assert len(named) > 10
    assert named - known == set()


def test_the_script_after_the_move_records_what_the_one_before_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (spec,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert comgra.load_spec(yaml.safe_load(spec)).schedule.every == 10
    Path("spec.yaml").write_text(spec)
    namespace: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(code, namespace)
    run = namespace["run"]
    assert run.path == tmp_path / "data" / "sums" / "first"
    assert {*run.slots.kind} == {"input", "parameter", "computed", "target", "loss"}
    assert len(run.kpis()) == 100
    assert run.value("first", 0).shape == (5, 8)
