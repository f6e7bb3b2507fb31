"""One recorded run, as opened by `open_run`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.bins import Spacing
from comgra_decl.errors import UnknownNameError, did_you_mean, is_one_of, shown
from comgra_decl.pictures import layouts
from comgra_decl.pictures.cloud import Basis
from comgra_decl.records import AUTOMATIC, MEMORY, MODULE_TIMES, PROFILE, Structure
from comgra_decl.spec.probes import probe_type
from comgra_decl.store.checks import NotedCheck
from comgra_decl.store.parts import Part

from . import arrays, between, derived, graphs, statistics
from .arrays import Arrays
from .attributions import EXPLAINED, Spans, attribution_table
from .between import Between
from .checkpoints import Checkpoint, checkpoint, checkpoint_steps
from .chunks import Chunk, chunks
from .circuits import Circuit, circuit_of
from .display import from_viewer
from .edge_effects import EdgeEffects, edge_effects_of
from .effects import Effects, induction_table, tokens_of
from .measured import (
    memory_moments,
    memory_steps,
    memory_table,
    profile_steps,
    profile_table,
    times_table,
)
from .picture import Picture
from .pictures import Pictures
from .plane import Plane, plane_of
from .post_mortem import Ending, ending_of
from .run_facts import RunFacts
from .sample_table import sample_table
from .shown import shown_table, shown_value
from .slot import Slot
from .tables import findings_table, table_html

if TYPE_CHECKING:
    import xarray


class Run(RunFacts):
    """A recorded run. Its contents are loaded on access.

    All data is as of the last `refresh` or, before the first one, as of opening the run. New
    records of a live run appear only after `refresh`. Thread-safe.

    `slot` returns a handle to one recorded tensor. Two arguments are common to many methods. `type`
    selects the records by type of execution or by tag; None selects the records in train mode, or
    all records if there are none in train mode. `over_batch` selects how per-sample statistics are
    aggregated over the batch: "mean", "std" or "abs_max". In every table, NaN means that nothing
    was recorded. If a tensor contained NaN or infinite values, its `nonfinite` is above 0.
    """

    # -- contents

    @property
    def records(self) -> pd.DataFrame:
        """All records, one row per record.

                   step   type   mode          time structure batch_size      cost  kept tags
            record
            0         0  train  train  1.763719e+09  9f2c41ab         32  0.004130  None   ()
            1        10  train  train  1.763719e+09  9f2c41ab         32  0.001702  None   ()

        `time` is in Unix seconds. `structure` is the hash of the dependency graph. `cost` is the
        time that the training thread spent on the record, in seconds. `kept` names the triggers in
        the spec's `keep` section that stored the record, or is None. `tags` are the labels other
        than the type.
        """
        return self._snapshot.records_table.copy()

    @property
    def steps(self) -> NDArray[np.int64]:
        """Steps of the records in train mode, ascending."""
        snapshot = self._snapshot
        if "train" not in snapshot.view.names("mode"):
            return np.empty(0, np.int64)
        return np.sort(snapshot.steps[snapshot.records(None)])

    @property
    def types(self) -> list[str]:
        """Types of execution, in order of first appearance."""
        return list(self._snapshot.types)

    @property
    def tags(self) -> list[str]:
        """Labels of records other than their type, in order of first appearance."""
        return list(self._snapshot.tags)

    @property
    def nodes(self) -> list[str]:
        """Nodes, in order of first appearance."""
        return list(self._snapshot.nodes)

    @property
    def slots(self) -> pd.DataFrame:
        """All slots, one row per slot.

                 node    role  iteration     pass      kind    dtype    shape  batch_dim ...
            slot
            0   embed  output          0  forward  computed  float32  (32, 8)          0
            1    head  output          0  forward  computed  float32  (32, 2)          0

        The table also has the columns `module_class` and `names`, which contains all names of a
        shared tensor. `shape` is the shape in the first record; `Slot.shapes` returns the shape in
        each record.
        """
        return self._snapshot.slots_table.copy()

    @property
    def statistics(self) -> list[str]:
        """Names of the recorded statistics, followed by derived ones such as `update_ratio`."""
        return [*self._reader.meta.statistics, *derived.offered(self._snapshot)]

    @property
    def sample_count(self) -> int:
        """Number of samples that are recorded individually in each record."""
        return self._reader.meta.sample_count

    @property
    def bins(self) -> int | None:
        """Number of bins of a histogram; None if the run has no histograms."""
        return self._reader.meta.bins

    @property
    def spacing(self) -> Spacing:
        """How the bins of histograms lie between their ends: "signed_log" or "linear"."""
        return self._reader.meta.spacing

    def kpis(self, *, automatic: bool = False) -> pd.DataFrame:
        """Return the metrics of all steps, recorded or not, one row per value.

               step   type  name     value
            0     0  train  loss  2.302585
            1     1  train  loss  2.287411

        These are the losses ("loss", "loss[1]", ...) and everything logged with `comgra.kpi`.

        Args:
            automatic: whether to add the metrics that require no code in the program: "lr",
                "grad_norm", "time/step", "memory/host", ... (see `docs/around.md`). If the program
                logs a metric with the same name, the program's metric is returned.
        """
        table = self._snapshot.kpis_table
        own = ~table["name"].str.startswith(AUTOMATIC).to_numpy(bool)
        if not automatic:
            return table[own].reset_index(drop=True)
        names = table["name"].str.removeprefix(AUTOMATIC)
        kept = own | ~names.isin(set(table["name"][own])).to_numpy(bool)
        return table.assign(name=names)[kept].reset_index(drop=True)

    def metrics_as_stored(self) -> pd.DataFrame:
        """Return all metrics as `kpis` does, with the prefix "auto:" for automatic ones."""
        return self._snapshot.kpis_table.copy()

    def notes(self) -> pd.DataFrame:
        """Return the notes of the run in order, one row per note.

               step   type          time               text
            0    40  train  1.763719e+09  warm-up is over

        `time` is in Unix seconds.
        """
        return self._snapshot.notes_table.copy()

    def findings(self) -> pd.DataFrame:
        """Return the rules' findings during recording, one row per finding, most important first.

        The columns are:

        - `rule`: name of the rule
        - `severity`: "error", "warning" or "hint"
        - `node`, `role`, `iteration`, `pass`: the slot; None if the finding is about the whole run
        - `first_step`, `last_step`: range of steps
        - `message`: what was found
        - `advice`: what to do
        - `also`: number of other tensors with the same finding
        - `because`: name of the rule that explains the finding, or None
        - `after_step`: last step known to be free of the problem, or None if unknown; the problem
          began after that step, at the latest at `first_step`

        `comgra_decl.rules.diagnose` applies the rules again.
        """
        return findings_table(self._snapshot.view.document("findings"))

    def profile(self, *, by: str = "node") -> pd.DataFrame:
        """Return where the time of the profiled steps went, one row per node and pass.

                                      calls  host_ms  host_self_ms  device_ms ...  share
            node            pass
            blocks.0        forward     1.0     1.92          0.21       0.84      0.120
            blocks.0.attn   forward     1.0     1.10          1.10       0.51      0.073
                            backward    0.0     2.31          2.31       1.04      0.148

        Every number is a mean over the profiled steps. `host_ms` and `device_ms` include the
        modules called within a node, and `host_self_ms` and `device_self_ms` do not. `kernels` is
        the number of kernels and copies on the device, `operations` the number of torch's
        operations, and `bytes` the memory allocated minus the memory freed; all three include
        modules within. `share` is a node's share of all device time or, if no device was used, of
        the time of a step. Rows with the highest share come first. The passes are "forward",
        "backward" and "no_grad"; the node "(program)" stands for everything outside of modules, and
        also has the passes "data", "optimizer", "other" and, for tracing's own work, "tracing".

        Args:
            by: "node" for this table, or "step" for one row per profiled step, with the
                milliseconds of "data", "forward", "backward", "optimizer", "other" and "total", and
                "busy", the time in which a device worked.

        Raises:
            UnknownNameError: `by` is not one of these, or the run has no profile; the message says
                how to create one.
        """
        tables = {"node": profile_table, "step": profile_steps}
        if not is_one_of(by, tables):
            hint = did_you_mean(by, tables)
            raise UnknownNameError(f"by must be 'node' or 'step', got {shown(by)}{hint}")
        return tables[by](self.document(PROFILE))

    def module_times(self) -> pd.DataFrame:
        """Return the time of each node's forward pass, measured without a profiler.

                      calls  forward_ms  forward_self_ms  share
            node
            Net         1.0        1.92             0.11  1.000
            block       2.0        1.10             1.10  0.573

        All numbers are means over a few training steps that were neither recorded nor profiled, by
        the host's clock; `attrs["steps"]` is the number of these steps. `forward_ms` includes the
        modules called within the node, and `forward_self_ms` excludes them. `share` is that of
        `forward_ms` in the time of all modules. Only calls with gradients count. On a GPU, it is
        the time in which the host queues work; `profile` measures the device.

        Raises:
            UnknownNameError: nothing was timed; the message says when modules are timed.
        """
        return times_table(self.document(MODULE_TIMES))

    def memory(self, *, by: str = "node") -> pd.DataFrame:
        """Return what holds the memory in the measured steps, in bytes, one row per node.

                      calls  activations  activations_self  peak  parameters  gradients  optimizer
            node
            Net           1       131072                 0  ...       33280      33280      66560
            block         1        98304             65536  ...       16640      16640      33280

        `activations` are the tensors that autograd has saved for the backward pass when the model
        returns, including those saved by modules within the node, and `activations_self` excludes
        them. Each is counted once, for the first module that saves it; parameters are not
        activations. `peak` is the largest size of saved tensors at any time. `parameters` includes
        buffers. `gradients` and `optimizer` (its states) are as of the end of the step.
        `allocated` is by how much the memory that torch has allocated on the CUDA device grew
        during the calls, including outputs; NaN without a device. In the row "(other)", which only
        exists with a device, it is the memory that is allocated at the end of the step, but neither
        for parameters and gradients nor for optimizer states: data and tensors that the program
        keeps, those that autograd has not freed, and what tracing itself has allocated.
        `checkpoint_saves` is by how much
        `activations` would shrink if a checkpoint kept only the node's inputs and repeated its
        forward pass. With several measured steps, every number is the largest one.

        With `by="step"`, the result has one row per measured step, with the totals of the model:
        `parameters`, `optimizer`, `gradients` (at the end of the step), `activations` (the most at
        any time) and `other` (NaN without a device).

        With `by="moment"`, it has one row per change of the saved tensors in the step in which they
        took up the most, and one column per node, in the order in which they first saved a tensor:
        the bytes that autograd holds for the node, without nodes within it. At first they grow (the
        forward pass), then they shrink (the backward pass). `attrs["totals"]` contains the totals
        of that step, and `gradients_before`, the gradients before its first model call.

        Raises:
            UnknownNameError: `by` is not one of these, or the memory was not measured; the message
                says how to do so.
        """
        tables = {"node": memory_table, "step": memory_steps, "moment": memory_moments}
        if not is_one_of(by, tables):
            hint = did_you_mean(by, tables)
            raise UnknownNameError(f"by must be 'node', 'step' or 'moment', got {shown(by)}{hint}")
        return tables[by](self.document(MEMORY))

    def experiments(self) -> list[NotedCheck]:
        """Return the verdicts of experiments with the script that are stored next to the run.

        `comgra-decl overfit-one-batch --for RUN` and `batch-mixing --for RUN` store them. If a
        verdict cannot be read, it is omitted and listed in `damage`; `noted` contains the reason.
        """
        return list(self.noted().verdicts)

    @property
    def ending(self) -> Ending | None:
        """How the program ended, if it raised an error or was killed; None otherwise.

        `headline` is a sentence, and `parts` contains titles with lines of text. `content` is the
        post-mortem as plain data; see `docs/around.md`.
        """
        return ending_of(self)

    def document(self, name: str) -> Any:
        """Return the newest document with the given name, as stored; None if there is none.

        Documents are "modules", "report", "post_mortem", "links" (where the tools in `sinks` have
        the run, by tool) and "findings", which `comgra_decl.rules.stored` reads.
        """
        return self._snapshot.view.document(name) if is_one_of(name, [name]) else None

    def chunks(self, *, probes: bool = True) -> Iterator[Chunk]:
        """Yield all records in stored order, in chunks.

        Use this method to process an entire run with little memory, as the rules do.

        Args:
            probes: whether to include the records of probes.
        """
        return chunks(self._snapshot, probes=probes)

    # -- graph

    def structure(self, step: int | None = None, *, type: str | None = None) -> Structure | None:
        """Return the dependency graph at a step (None: the last one); None if there is none."""
        return graphs.structure(self._snapshot, step, type)

    def structure_hash(self, step: int | None = None, *, type: str | None = None) -> str | None:
        """Return the hash of the graph at a step; identical graphs have identical hashes."""
        return graphs.structure_hash(self._snapshot, step, type)

    def edges(self, step: int | None = None, *, type: str | None = None) -> list[tuple[str, str]]:
        """Return the (source node, sink node) pairs of the graph at a step, each pair once.

        Connections within a node are omitted, but `structure` contains them. If a tensor from an
        earlier step is used again, it is a separate node, such as "cell (earlier step)".
        """
        return graphs.edges(self._snapshot, step, type)

    def between(
        self,
        source: str | Slot,
        sink: str | Slot,
        *,
        step: int | None = None,
        type: str | None = None,
    ) -> Between:
        """Return what happens between two tensors: gains, dead values and gradient paths.

        `run.between("embed", "head").signal` is the root mean square of a sample's values at
        "head", averaged over the batch, divided by the same quantity at "embed". `gradient` is the
        same ratio for the gradients, in the backward direction. `dead` is the largest share of
        zeros on the way. `paths` are the paths through the graph, ranked by the share of the
        gradient that they carry. Where a tensor has several readers, its gradient is the sum of
        their contributions. These are not recorded, so each reader's contribution is estimated to
        be proportional to the l2 norm of the reader's own gradient.

        Args:
            source: the tensor at the beginning: a node, whose output is meant, or a slot.
            sink: the tensor at the end.
            step: a recorded step; None: the last one.
            type: type of execution; None: training.

        Raises:
            UnknownNameError: there is no such tensor or step.
        """
        ends = [self.slot(end).key if isinstance(end, str) else end.key for end in (source, sink)]
        return between.between(self._snapshot, ends[0], ends[1], step, type)

    # -- statistics

    def cuts(self, step: int | None = None, *, type: str | None = None) -> list[str]:
        """Return the places in a step where values leave torch, so that the graph ends there.

        Each entry names a node and the call through which its values leave, such as `head.item()`.
        Tensors that the program computes from such values have no edge from that node.
        """
        graph = self.structure(step, type=type)
        return [] if graph is None else list(graph.cuts)

    def slot(
        self, node: str, *, role: str = "output", of: str = "forward", iteration: int = 0
    ) -> Slot:
        """Return a handle to one recorded tensor, for its series, values and histograms.

        Args:
            node: a module path or an annotated name.
            role: "output", "input", the name of a parameter, ...
            of: the pass: "forward", "grad", "update", ...
            iteration: which call of the node within the step, counting from 0.

        Raises:
            UnknownNameError: no such slot was ever recorded; the message suggests similar names.
        """
        key = self._snapshot.slot(node, role, iteration, of).key
        return Slot(lambda: self._snapshot, key)

    def __getitem__(self, node: str) -> Slot:
        """Return the output of a node, as `slot(node)` does."""
        return self.slot(node)

    def series(
        self,
        node: str,
        statistic: str = "mean",
        *,
        over_batch: str = "mean",
        type: str | None = None,
    ) -> pd.Series[float]:
        """Return a statistic of a node's output by step: `slot(node).series(statistic)`.

            step
            0     1.002241
            10    0.987120
            Name: std, dtype: float32

        NaN where the output was not recorded.
        """
        return self.slot(node).series(statistic, over_batch=over_batch, type=type)

    def value(
        self,
        node: str,
        step: int,
        *,
        sample: int | None = None,
        part: Part = ...,
        type: str | None = None,
    ) -> NDArray[Any]:
        """Return a node's recorded values, [samples, ...]: `slot(node).value(step)`."""
        return self.slot(node).value(step, sample=sample, part=part, type=type)

    def row(self, step: int, *, over_batch: str = "mean", type: str | None = None) -> pd.DataFrame:
        """Return all statistics of all slots recorded at a step, one row per slot.

        The index has the levels node, role, iteration and pass:

                                                    mean       std        l2 ...
                node  role   iteration pass
                embed output 0         forward  0.013201  1.002241  5.672901
                head  output 0         forward -0.104114  0.581002  1.180234
                                       grad     0.000000  0.021250  0.042500
        """
        return statistics.row(self._snapshot, step, type, over_batch)

    def shapes(self, step: int, *, type: str | None = None) -> pd.Series[Any]:
        """Return the shapes of all slots recorded at a step, indexed as in `row`.

            node   role    iteration  pass
            embed  output  0          forward    (32, 8)
            head   output  0          forward    (32, 2)
            Name: shape, dtype: object

        None where the record is damaged.
        """
        return statistics.shapes(self._snapshot, step, type)

    @property
    def reshaped(self) -> bool:
        """Whether any tensor changed shape between records."""
        return self._snapshot.view.reshaped

    def samples(self, step: int, *, type: str | None = None) -> pd.DataFrame:
        """Return the samples recorded individually at a step, one row per sample.

                    place label
            sample
            0           0   cat
            1           7   dog

        `place` is the sample's index in the batch; `label` is its category, or None.
        """
        snapshot = self._snapshot
        record = snapshot.record(step, type)
        places = snapshot.view.samples(record)
        labels = snapshot.view.extra(record).get("labels") or [None] * len(places)
        index = pd.RangeIndex(len(places), name="sample")
        return pd.DataFrame({"place": places, "label": pd.Series(labels, index, object)}, index)

    def samples_frame(
        self,
        *names: str,
        nodes: str | Sequence[str] = "**",
        of: str | None = None,
        type: str | None = None,
    ) -> pd.DataFrame:
        """Return the statistics of all recorded samples: one row per step and sample.

                         place label  conv/output/forward/std  head/output/forward/std
            step sample
            0    0           0   cat                 1.002241                 1.180234
                 1           7   dog                 0.581002                 1.094518

        The columns after `place` and `label` (see `samples`) are features of the sample, float32:
        each statistic of each tensor that has samples, except targets and losses. They are named
        NODE/ROLE/PASS/STATISTIC, as in other tools. NaN where a tensor was not recorded.

        Args:
            names: names of the statistics; by default, all recorded ones. A name that is given
                twice makes one column.
            nodes: globs over the names of nodes, such as "blocks.**".
            of: the pass: "forward", "grad", ...; None: all passes.
            type: type of execution or tag; None: training.

        Raises:
            UnknownNameError: a statistic or the pass does not exist, or no node matches a glob.
        """
        return sample_table(self._snapshot, names, nodes=nodes, of=of, type_=type)

    def unusual(
        self, step: int, statistic: str = "std", *, type: str | None = None
    ) -> pd.DataFrame:
        """Return how far each recorded sample is from the rest of its batch, at each tensor.

            sample                                      0         1
            node  role   iteration pass
            embed output 0         forward         -0.412     0.297
            head  output 0         forward         -0.371    11.806

        The unit is the standard deviation of the statistic over the other samples in the batch, and
        0 is their mean. The sample itself is left out, because an outlier in a small batch would
        inflate the deviation and so hide itself. In the example, sample 1 becomes an outlier
        between "embed" and "head". NaN for tensors without a batch dimension and in batches of
        fewer than three samples.

        Raises:
            UnknownNameError: the step or the statistic does not exist.
        """
        return statistics.unusual(self._snapshot, step, statistic, type)

    def heat(
        self,
        statistic: str,
        *,
        of: str = "forward",
        over_batch: str = "mean",
        type: str | None = None,
    ) -> pd.DataFrame:
        """Return a statistic for all slots in a pass: one row per step, one column per slot.

        The columns have the levels node, role, iteration and pass:

            node          embed      head
            role         output    output
            iteration         0         0
            pass        forward   forward
            step
            0          5.672901  1.180234
            1          5.671177  1.094518
        """
        return statistics.heat(self._snapshot, statistic, of, over_batch, type)

    def table(
        self,
        *names: str,
        nodes: str | Sequence[str] = "**",
        of: str | None = None,
        over_batch: str = "mean",
        type: str | None = None,
    ) -> pd.DataFrame:
        """Return statistics of many tensors, one row per record and tensor.

               step    node    role  iteration     pass        l2
            0     0   embed  output          0  forward  5.672901
            1     0    head  output          0  forward  1.180234

        Args:
            names: names of the statistics.
            nodes: globs over the names of nodes, such as "blocks.**".
            of: the pass: "forward", "grad", ...; None: all passes.
            over_batch: "mean", "std" or "abs_max".
            type: type of execution; None: training.

        Raises:
            UnknownNameError: a statistic or the pass does not exist, or no node matches a glob.
        """
        return statistics.long(
            self._snapshot, names, nodes=nodes, of=of, over_batch=over_batch, type_=type
        )

    def to_xarray(
        self,
        *names: str,
        of: str | None = None,
        over_batch: str = "mean",
        type: str | None = None,
    ) -> xarray.Dataset:
        """Return statistics as an `xarray.Dataset` with the dims step and slot.

        `node`, `role`, `iteration` and `pass` are coordinates of the dim slot.

        Args:
            names: names of the statistics; by default, all recorded ones.
            of: the pass whose slots are returned: "forward", "grad", ...; None: all slots.
            over_batch: "mean", "std" or "abs_max".
            type: type of execution; None: training.

        Raises:
            MissingPackageError: xarray is not installed; the message names the extra to install.
            UnknownNameError: a statistic or the pass does not exist.
        """
        wanted = names or self._reader.meta.statistics
        return arrays.dataset(self._snapshot, wanted, of, over_batch, type)

    # -- pictures

    @property
    def pictures(self) -> list[str]:
        """Names of the pictures: those that probes recorded, then those computed from records."""
        return Pictures(self, self._snapshot, None).names

    @property
    def shown(self) -> pd.DataFrame:
        """What the program has shown with `comgra.image`, `comgra.figure` and `comgra.text`.

               step            name   kind
            0   100   worst samples  image
            1   100  generated text   text

        One row each, by step. `shown_value` returns the images and texts themselves.
        """
        return shown_table(self._snapshot)

    def shown_value(self, name: str, step: int | None = None) -> NDArray[np.uint8] | str:
        """Return an image, [height, width, channels] from 0 to 255, or a text.

        Args:
            name: its name, as in `shown`.
            step: the step; None: the last one. If something was shown several times in a step, the
                last one is returned.

        Raises:
            UnknownNameError: nothing of this name was shown at this step.
        """
        return shown_value(self._snapshot, name, step)

    @property
    def checkpoints(self) -> NDArray[np.int64]:
        """Steps with a checkpoint, ascending; see `checkpoint`."""
        return checkpoint_steps(self._snapshot)

    def checkpoint(self, step: int, *, model: str | None = None) -> Checkpoint:
        """Return the parameters and buffers with which the forward pass of a step began.

            >>> run.checkpoint(400)
            <Checkpoint of 'Net' at step 400: 12 tensors>

        The result maps the names in the model's state dict to numpy arrays. `comgra.look(model, x,
        weights=run.checkpoint(400))` repeats a call of that step.

        Args:
            step: one of `checkpoints`.
            model: the node of the model, if the step called several.

        Raises:
            UnknownNameError: there is no such checkpoint; the message says what there is.
        """
        return checkpoint(self._snapshot, step, model)

    def plane(self, steps: Iterable[int] | None = None, *, model: str | None = None) -> Plane:
        """Return the plane in which the parameters of the checkpoints move most.

            >>> run.plane().save("plane.npz")

        With this file, `plane: plane.npz` of the picture `loss_slice` shows the loss in this plane
        and the way of the training through it.

        Args:
            steps: some of `checkpoints`; None: all. The plane goes through the last one.
            model: the node of the model, if the steps called several.

        Raises:
            UnknownNameError: there are fewer than three checkpoints, or not those.
        """
        chosen = self.checkpoints.tolist() if steps is None else sorted(map(int, steps))
        return plane_of([self.checkpoint(step, model=model) for step in chosen])

    def picture(
        self,
        name: str,
        step: int | None = None,
        node: str | None = None,
        *,
        type: str | None = None,
    ) -> Picture:
        """Return a picture, which converts to a numpy array.

            >>> run.picture("cam", 400, "conv2")
            <Picture 'cam' of 'conv2' at step 400: sample 8, height 6, width 6>

        In addition to the pictures declared in the spec, these are computed from the records:

        - `likeness`: CKA of all pairs of nodes at a step (unbiased; NaN below four samples);
          `facts["samples"]` is the number of samples of each node
        - `likeness_over_steps`: CKA of a node between all pairs of steps; `facts["samples"]` is the
          number of samples at each step
        - `confusion`: counts of each class and predicted class, at each step or at one
        - `reliability`: confidence, accuracy and samples in ten bins of confidence, at a step
        - `linear_probe`: accuracy of a ridge classifier of each node's output on every other sample
          of each class, after fitting it to the rest
        - `dead_units`: whether each unit of a node is at or below 0 everywhere, by step
        - `spectrum`: singular values of a node's weight, at each step or at one
        - `flow`: the gradient norm of each node at a step, in the order of the calls
        - `loss_cam`: Grad-CAM of the loss at a training step, from an output and its gradient
        - `feature_maps`: a node's output for each sample at a step, one map for each channel
        - `filters`: the kernels of a convolution at a training step, [filter, channel, ...]
        - `confident_errors`: the wrong predictions of a step, the most confident one first: sample,
          class, predicted class, confidence
        - `foreign_auroc`: how well the largest probability tells familiar samples from those of
          `foreign` categories of the probe, at each step or at one
        - `top_samples`: for each unit of a node, the samples with its largest values, and these
          values; the value of a unit in a sample is the largest one at any position
        - `unit_effects`: the units of a node, ranked by how much they differ between one category
          and all other samples (Cohen's d in half of the samples, and in the other half)
        - `unit_effects_of_types`: the same between types of execution, at their last records up to
          the step; interventions are left out
        - `coactivation`: the correlation of each pair of units over samples and positions
        - `concept_vectors`: the direction of length 1 that tells each category of samples from all
          others in a node (ridge regression on the first, third, ... sample of each category);
          `facts["accuracy"]` is that on the others
        - `concept_derivatives`: the derivative of the loss along these directions at each sample of
          the training step, from the recorded gradient; `facts["lowers_loss"]` is the share of the
          samples at which it is negative, for each category
        - `separability`: how far the samples in a node have collapsed, and their categories are
          apart, by step: variability collapse (NC1), silhouette, effective rank
        - `lens_from_records`: the logit lens of each layer of a language model, whose norm and head
          were recorded: the log-probability of the token that the model predicts at each position;
          `facts["tokens"]` are those that the layers would predict

        Args:
            name: one of `pictures`.
            step: the step; None: all steps if the picture can show several, otherwise the last.
            node: the node, if the picture shows one of several.
            type: type of execution; None: the probe of a declared picture, training for `spectrum`,
                `flow`, `loss_cam` and `filters`, and otherwise the first probe, or training without
                a probe.

        Raises:
            UnknownNameError: there is no such picture, it could not be made, or the records lack
                the data that it requires; the message gives the reason or says what to declare.
        """
        return Pictures(self, self._snapshot, type).named(name, step, node)

    def token_attributions(
        self, name: str, step: int | None = None, *, by: str = "sum", spans: Spans | None = None
    ) -> pd.DataFrame:
        """Return one number for each token of the input of a language model, from a picture.

            >>> run.token_attributions("why", 400).loc[0]
                     token     value
            position
            0          the  0.012381
            1          cat  0.341702

        Args:
            name: a declared picture of a model whose input is tokens.
            step: the step; None: the last.
            by: how the numbers of a token's embedding become one: their "sum", their norm "l2", or
                the sum of their magnitudes "abs". Pictures with one number per token ignore it.
            spans: named spans, such as `{"question": (0, 5), "answer": (5, 9)}`; the last position
                of a span is not part of it.

        Returns:
            One row per sample and position with "token" and "value". The token is text if the spec
            has `tokens`, and otherwise a number; it is missing if the input was not recorded. With
            `spans`, one row per sample, and the sum of each span as a column. If the picture
            explains several positions, the index also has "explained", the explained position.

        Raises:
            UnknownNameError: there is no such picture, reduction or span, or the picture has no
                number for each token.
        """
        picture = self.picture(name, step)
        if picture.step is None or name not in self.spec.pictures:
            raise UnknownNameError(f"the picture {name!r} has no number for each token.")
        type_ = probe_type(self.spec.pictures[name].of)
        record = self._snapshot.record(picture.step, type_)
        axis = 2 if EXPLAINED in picture.labels else 1
        size = picture.values.shape[axis] if picture.values.ndim > axis else 0
        tokens = tokens_of(self._snapshot, record).get(size)
        return attribution_table(picture, tokens, self.tokens, by=by, spans=spans)

    def picture_facts(self, step: int, *, type: str | None = None) -> dict[str, dict[str, Any]]:
        """Return the facts about the pictures that a probe created at a step, by name.

        Each entry has "method", and "target", "gap" or "layer" where they apply. "refused" is the
        reason why a picture could not be made.

        Args:
            step: the step.
            type: type of execution; None: the first probe.
        """
        return Pictures(self, self._snapshot, type).facts(step)

    def embedding(
        self,
        node: str,
        basis: str | Basis = "all",
        *,
        method: str = "pca",
        type: str | None = None,
    ) -> Picture:
        """Return a node's values as points in the plane, [steps, samples, 2].

        By default, these are principal components. All steps share one basis, so that points move
        only if the values do. To use the same basis for later records, pass
        `embedding(...).basis`.

        `method="tsne"` and `method="umap"` need the extra `projections`. t-SNE begins at each step
        with the layout of the step before it; UMAP lays out all steps together (AlignedUMAP). A
        further record changes the layout of all steps by UMAP. `facts["trustworthiness"]` states,
        for each step, how far neighbours in the plane are neighbours in the values; at most 1.

        Args:
            node: the node.
            basis: the steps to which the basis is fitted, "all" or "last", or an existing basis
                of the same node; for principal components only.
            method: "pca", "tsne" or "umap".
            type: type of execution; None: the first probe, or training if there is no probe.

        Raises:
            UnknownNameError: no values of this node were recorded, or too few; or there is no such
                method.
            SelectionError: the basis is that of another node, or has another number of features.
            MissingPackageError: openTSNE or umap-learn is not installed.
        """
        if method in layouts.METHODS:
            if basis != "all":
                raise UnknownNameError(f"method={method!r} has no basis; omit `basis`.")
            return Pictures(self, self._snapshot, type).layout(node, method)
        if method != "pca":
            known = ("pca", *layouts.METHODS)
            raise UnknownNameError(
                f"method={shown(method)} is not one of {', '.join(known)}"
                f"{did_you_mean(method, known)}."
            )
        return Pictures(self, self._snapshot, type).embedding(node, basis)

    def similarity(
        self, node_a: str, node_b: str, step: int | None = None, *, type: str | None = None
    ) -> float:
        """Return how similarly two nodes represent the recorded samples at a step; at most 1.

        The linear CKA of Kornblith et al. (2019), unbiased; NaN for fewer than four samples.

        Args:
            node_a: a node.
            node_b: another node.
            step: the step; None: the last.
            type: type of execution; None: the first probe, or training if there is no probe.

        Raises:
            UnknownNameError: no values of these nodes were recorded at this step.
        """
        return Pictures(self, self._snapshot, type).similarity(node_a, node_b, step)

    # -- interventions

    @property
    def interventions(self) -> list[str]:
        """Names of the interventions that have records."""
        return Effects(self._snapshot).names

    def effects(
        self, intervention: str, step: int | None = None, *, share: bool = False
    ) -> pd.DataFrame:
        """Return how much an intervention changes what it measures.

            >>> run.effects("heads")
                                 mean     error         0         1
            step node   head
            0    h.0.attn 0  0.012381  0.004102  0.016483  0.008279
                          1 -0.003127  0.001046 -0.002081 -0.004173

        The index has "step" and the axes of the intervention's `sweep`; there is one row for each
        place. An effect is the measure with the change minus the measure without it. The columns
        are "mean" over the samples, "error" (the standard error of the mean; NaN for a single
        sample) and the samples, by number. The effect on a sample that has no measure even in the
        unchanged pass, such as a loss without any label, is NaN; the mean and the error are those
        of the others.

        Args:
            intervention: one of `interventions`.
            step: the step; None: all.
            share: whether to divide by the difference between the unchanged pass and the one
                without the change. After changes in `first` that corrupt the samples, 1 means that
                the place restores the measure completely (Meng et al. 2022, "Locating and editing
                factual associations in GPT"). The mean is divided by the mean difference. It is NaN
                where these changes have no effect.

        Raises:
            UnknownNameError: there is no such intervention or step, or nothing was measured, or
                `share` is True for an intervention without a sweep or without changes in `first`;
                the message gives the reason.
        """
        return Effects(self._snapshot).table(intervention, step, share=share)

    def intervention_facts(self, intervention: str, step: int | None = None) -> dict[str, Any]:
        """Return the facts about an intervention at a step.

        "changes" has an entry for each change, in order: "tensors" and "elements" that were to be
        changed, the number of elements that differ afterwards ("changed"), and the "largest"
        difference. "received" is the same for the receivers in `into`, as a sum over all pairs of a
        sweep. "same" is True if the model's output was the same and, where "gradients" is True
        because they were changed or measured, those of all parameters and inputs, too. "measure" is
        what was measured, "clean" each sample's value in the unchanged pass, and "baseline" that
        without the change. If nothing could be measured, "unmeasured" is the reason.

        Args:
            intervention: one of `interventions`.
            step: the step; None: the last.

        Raises:
            UnknownNameError: there is no such intervention or record.
        """
        return Effects(self._snapshot).facts(intervention, step)

    def circuit(
        self,
        intervention: str,
        step: int | None = None,
        *,
        above: float = 0.0,
        strongest: int | None = None,
    ) -> Circuit:
        """Return the strongest paths of an intervention as a graph.

            >>> circuit = run.circuit("edges", strongest=20)
            >>> circuit.links[0]
            Link(source='blocks.0.attn', sink='blocks.1.attn', effect=0.312, error=0.041)

        The intervention needs receivers in `into`, and a sweep over `node` and `into`; its effects
        may be real or estimated. `export_run` writes the graph to a file.

        Args:
            intervention: one of `interventions`.
            step: the step; None: the last.
            above: paths are omitted unless the magnitude of their mean effect is larger.
            strongest: the largest number of paths; None: all.

        Raises:
            UnknownNameError: there is no such intervention or step, nothing was measured, or the
                intervention has no paths; the message gives the reason.
        """
        effects = Effects(self._snapshot)
        at = effects.last(intervention) if step is None else step
        table, facts = effects.table(intervention, at, share=False), effects.facts(intervention, at)
        return circuit_of(intervention, at, table, facts, above=above, strongest=strongest)

    def edge_effects(
        self,
        intervention: str,
        step: int | None = None,
        *,
        above: float = 0.0,
        strongest: int | None = None,
    ) -> EdgeEffects:
        """Return the effects of an intervention's paths on the edges of the recorded graph.

            >>> run.edge_effects("edges").table()
                                           effect  paths                       strongest
            source        sink
            blocks.1.attn blocks.1         0.0637      1           blocks.1.attn -> head
            blocks.0      blocks.1.mlp.0   0.0297      1   blocks.0.attn -> blocks.1.mlp

        A path leads from the changed module to its receiver, on every way through the graph that
        passes through no other module of the intervention. The effect of an edge is the sum over
        the paths through it.

        Args:
            intervention: one of `interventions`, with receivers as in `circuit`.
            step: the step; None: the last.
            above: edges are omitted unless the magnitude of their effect is larger.
            strongest: the largest number of paths; None: all.

        Raises:
            UnknownNameError: as in `circuit`, or the run has no graph.
        """
        circuit = self.circuit(intervention, step, strongest=strongest)
        structure = self.structure(circuit.step) if circuit.step in self.steps else self.structure()
        if structure is None:
            raise UnknownNameError("the run has no graph; record one with `graph: true`.")
        return edge_effects_of(circuit, structure, above=above)

    def induction(self, step: int | None = None, *, type: str | None = None) -> pd.DataFrame:
        """Return how much each attention head attends to what followed the same token before.

            >>> run.induction()["score"].unstack("step")
            step                             0        50       100
            node      iteration head
            blocks.1. 0         0     0.031250  0.044921  0.912351
                                1     0.029877  0.030011  0.028664

        The score of a head is the attention that queries pay to the positions after earlier
        occurrences of their token, as a mean over all queries for which there are any. It is the
        prefix matching score of Olsson et al. (2022), "In-context Learning and Induction Heads";
        the formula is in `comgra_decl.pictures.units.induction`. "queries" is their number; a query
        whose only such position is its own does not count. For tokens that rarely repeat, the score
        is uncertain. The weights are those that were recorded: if the program applies dropout to
        attention weights before it returns them, as eager attention often does in training, the
        scores contain it. Weights that are recomputed for fused attention have no dropout.

        Args:
            step: the step; None: all.
            type: type of execution; None: training.

        Raises:
            UnknownNameError: the records lack values of attention weights or of tokens.
        """
        return induction_table(self._snapshot, step, type)

    # -- tensors by slot id

    def values_of(self, record: int) -> dict[int, NDArray[Any]]:
        """Return all values [samples, ...] of a record (a row of `records`), by slot id."""
        view = self._snapshot.view
        found = {slot: view.value(record, slot) for slot in view.value_slots(record)}
        return {slot: value for slot, value in found.items() if value is not None}

    @property
    def arrays(self) -> Arrays:
        """The run as numpy arrays by slot id, for reading large parts of it."""
        return Arrays(self._snapshot)

    # -- display

    def view(self, pane: str | None = None, **at: Any) -> Any:
        """Return the viewer of this run, or one pane of it, for display in a notebook.

        It is interactive, like the viewer, and shows the run as of the last `refresh`. To follow a
        live run, use `comgra-decl view`. `run.view("graph").save("graph.html")` writes a
        self-contained file.

        Args:
            pane: None for the whole viewer; "graph", "steps", "statistics", "series",
                "distribution", "values"; or a section: "overview", "inspect", "kpis", "modules",
                "notes", ...
            **at: what to show, named as in the other methods: `node`, `role`, `step` (the nearest
                recorded one), `of`, `iteration`, `statistic`, `type`, `over_batch` or `sample`;
                `colour="grad"` colours the graph by the statistic of a pass, `scale="log"` applies
                to series, and `height` is in pixels.

        Raises:
            MissingPackageError: no viewer is installed.
            UnknownNameError: the pane, an argument, a node, a role, ... does not exist.
        """
        return from_viewer("notebook")(self, pane, **at)

    @property
    def plot(self) -> Any:
        """Plots of this run as HoloViews elements, which compose with `+` and `*`.

        ```python
        run.plot.series("memory", "std") * run.plot.series("head", "std")
        run.plot.heat("l2", of="grad") + run.plot.kpis()
        ```

        Its methods are `series`, `heat`, `kpis`, `cloud`, `distributions`, `graph`, `picture` and
        `effects`; `Slot.plot` and `Group.plot` have others.

        Raises:
            MissingPackageError: no viewer is installed.
        """
        return from_viewer("plot")(self)

    def _repr_html_(self) -> str:
        steps = self.steps
        began = datetime.fromtimestamp(self.started, UTC).astimezone()
        rows = [
            ("state", self.state if self.error is None else f"{self.state}: {self.error}"),
            ("records", f"{self._snapshot.view.n} ({', '.join(self.types) or 'none yet'})"),
            ("steps", f"{steps[0]} to {steps[-1]}" if len(steps) else "none yet"),
            ("nodes", str(len(self.nodes))),
            ("slots", str(len(self._snapshot.view.slots))),
            ("statistics", ", ".join(self.statistics)),
            ("started", f"{began:%Y-%m-%d %H:%M:%S}"),
            ("folder", str(self.path)),
        ]
        return table_html(f"Run {self.group}/{self.name}", ("", ""), rows)
