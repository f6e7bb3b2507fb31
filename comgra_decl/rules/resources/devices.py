"""Devices that wait for the host, and hosts that wait for a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

from comgra_decl.rules.api import (
    PROFILE,
    PROGRAM,
    Field,
    Finding,
    Int,
    Place,
    Positive,
    Rule,
    RuleParameters,
    Scene,
    Share,
)

_Times = Annotated[Int, Field(ge=1)]
_NO_PROFILE = "the run has no profile; name steps in the spec: `profile: {steps: [10, 13]}`"
_NO_DEVICE = "the profiled steps used no device"


def _profile(scene: Scene) -> Mapping[str, Any] | None:
    """Return the profile if its steps used a device."""
    content: Mapping[str, Any] | None = scene.documents.get(PROFILE)
    return content if content and content["steps"] and content["kernels"]["count"] else None


def _why_no_profile(scene: Scene) -> str | None:
    if _profile(scene) is not None:
        return None
    return _NO_DEVICE if scene.documents.get(PROFILE) else _NO_PROFILE


def _first_step(content: Mapping[str, Any]) -> int:
    return int(content["steps"][0]["step"])


def _per_step(content: Mapping[str, Any], counts: list[Mapping[str, Any]]) -> Counter[str]:
    """Return the counts per step, by node."""
    found: Counter[str] = Counter()
    for entry in counts:
        found[entry["node"]] += entry["count"] / len(content["steps"])
    return found


class HostDeviceCopiesParameters(RuleParameters):
    """Options of `host_device_copies`."""

    within: _Times = 1
    """Number of copies per step within modules that is reported."""

    in_all: _Times = 32
    """Number of copies per step in the whole program that is reported."""


class HostDeviceCopies(Rule):
    """Tensors that are copied between host and device within the model, or many times per step."""

    name = "host_device_copies"
    severity = "hint"
    certainty = 0.7
    definition = (
        "In the profiled steps, modules copy tensors between host and device at least `within` "
        "times per step, or the program does so at least `in_all` times per step."
    )
    source = (
        "PyTorch's performance tuning guide: avoid unnecessary copies between CPU and GPU. The "
        "thresholds are our own."
    )
    advice = (
        "Create tensors where they are needed: `torch.zeros(..., device=x.device)`, and register "
        "constants as buffers. Copy each batch once, before the model is called."
    )
    Parameters = HostDeviceCopiesParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the node with the most copies."""
        content = _profile(scene)
        if content is None:
            return []
        copies, limits = _per_step(content, content["copies"]), self.parameters
        total = sum(copies.values())
        inside = Counter({node: count for node, count in copies.items() if node != PROGRAM})
        if sum(inside.values()) < limits.within and total < limits.in_all:
            return []
        node, count = (inside or copies).most_common(1)[0]
        where = "outside of modules" if node == PROGRAM else f"in `{node}`"
        return [
            self.finding(
                scene,
                place=None if node == PROGRAM else Place(node),
                first_step=_first_step(content),
                message=f"Each step copies tensors between host and device {total:.3g} times, most "
                f"often {where} ({count:.3g} times).",
                evidence={"copies": total, "there": count},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the copies could not be counted, or None."""
        return _why_no_profile(scene)


class SynchronisingCallParameters(RuleParameters):
    """Options of `synchronising_call`."""

    in_all: _Times = 4
    """Number of waits per step outside of modules that is reported."""


class SynchronisingCall(Rule):
    """Calls such as `.item()` that make the host wait for the device in every step."""

    name = "synchronising_call"
    severity = "hint"
    certainty = 0.7
    definition = (
        "The model or the loss reads numbers of a tensor on a device (`item`, `tolist`, `cpu`, "
        "`nonzero`, a comparison in an `if`), according to the calls in the first records or, in "
        "the profiled steps, within a module. Or the whole program does so at least `in_all` times "
        "per profiled step."
    )
    source = "PyTorch's performance tuning guide: avoid unnecessary CPU-GPU synchronization."
    advice = (
        "Keep numbers on the device, and read them once every few steps: `total += loss.detach()`. "
        "Replace `if x.sum() > 0` with `torch.where`, and `x[mask]` with a product with the mask."
    )
    Parameters = SynchronisingCallParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the line, or the node, that waits most often."""
        counts: dict[str, tuple[int, str]] = {}
        for fact in scene.told("waits"):
            where, count = str(fact["where"]), int(fact.get("count", 1))
            counts[where] = max(counts.get(where, (0, "")), (count, str(fact["function"])))
        if counts:
            where, (count, name) = max(counts.items(), key=lambda item: item[1])
            return [
                self.finding(
                    scene,
                    place=Place(where),
                    first_step=0,
                    message=f"`{name}` in {where} makes the host wait for the device {count} "
                    f"time{'s' if count > 1 else ''} in each step.",
                    evidence={"times": count},
                    also=len(counts) - 1,
                )
            ]
        return [*self._profiled(scene)]

    def _profiled(self, scene: Scene) -> list[Finding]:
        content = _profile(scene)
        if content is None:
            return []
        reads = [entry for entry in content["waits"] if entry["name"].startswith("aten::")]
        waits = _per_step(content, reads)
        inside = Counter({node: count for node, count in waits.items() if node != PROGRAM})
        if not inside and waits[PROGRAM] < self.parameters.in_all:
            return []
        node, count = (inside or waits).most_common(1)[0]
        where = "outside of modules" if node == PROGRAM else f"in `{node}`"
        return [
            self.finding(
                scene,
                place=None if node == PROGRAM else Place(node),
                first_step=_first_step(content),
                message=f"Each step makes the host wait for the device {sum(waits.values()):.3g} "
                f"times, most often {where} ({count:.3g} times).",
                evidence={"times": sum(waits.values())},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return None, because the first records contain the calls if the graph is recorded."""
        return None if scene.structures else _why_no_profile(scene)


class SmallKernelsParameters(RuleParameters):
    """Options of `small_kernels`."""

    median_us: Positive = 10.0
    """Largest median duration of a kernel that is reported, in microseconds."""

    least: _Times = 200
    """Number of kernels per step required."""

    busy: Share = 0.5
    """Share of the time in which the device works, below which this is reported."""


class SmallKernels(Rule):
    """A device that waits because each of its kernels is too small."""

    name = "small_kernels"
    severity = "hint"
    certainty = 0.6
    definition = (
        "In the profiled steps, at least `least` kernels run per step, their median duration is "
        "below `median_us`, and the device works for less than the share `busy` of the time."
    )
    source = (
        "Launching a kernel takes the host several microseconds, so smaller kernels cannot keep "
        "the device busy. The thresholds are our own."
    )
    advice = (
        "Use larger batches, `torch.compile` (with `mode='reduce-overhead'` for CUDA graphs), the "
        "fused variants of optimizers (`fused=True`), and operations on whole tensors instead of "
        "loops."
    )
    Parameters = SmallKernelsParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the profiled steps."""
        content, limits = _profile(scene), self.parameters
        if content is None:
            return []
        kernels, busy = content["kernels"], _busy(content)
        count = kernels["count"] / len(content["steps"])
        if count < limits.least or kernels["median"] >= limits.median_us or busy >= limits.busy:
            return []
        return [
            self.finding(
                scene,
                first_step=_first_step(content),
                message=f"Each step runs {count:.0f} kernels with a median duration of "
                f"{kernels['median']:.2g} us, and the device works for only {busy:.0%} of the "
                "time.",
                evidence={"kernels": count, "median_us": kernels["median"], "busy": busy},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the kernels could not be checked, or None."""
        return _why_no_profile(scene)


class IdleDeviceParameters(RuleParameters):
    """Options of `idle_device`."""

    busy: Share = 0.3
    """Share of the time in which the device works, below which this is reported."""


class IdleDevice(Rule):
    """A device that does nothing for most of the time."""

    name = "idle_device"
    severity = "hint"
    certainty = 0.6
    definition = (
        "In the profiled steps, kernels and copies cover less than the share `busy` of the time. "
        "Because profiling slows the host down, the actual share is higher."
    )
    source = "The share is that of PyTorch's profiler (GPU utilization). The threshold is our own."
    advice = (
        "Look at the phases of a step (`comgra-decl profile RUN`): the device waits in the phase "
        "that takes most of the time. Load data in parallel, avoid waiting for the device, or use "
        "larger batches."
    )
    explained_by = ("input_bound", "small_kernels", "synchronising_call")
    Parameters = IdleDeviceParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the profiled steps."""
        content = _profile(scene)
        if content is None or _busy(content) >= self.parameters.busy:
            return []
        phases = ("data", "forward", "backward", "optimizer", "other")
        sums = {phase: sum(step[phase] for step in content["steps"]) for phase in phases}
        longest = max(sums, key=lambda phase: sums[phase])
        share = sums[longest] / sum(sums.values())
        return [
            self.finding(
                scene,
                first_step=_first_step(content),
                message=f"The device works for {_busy(content):.0%} of the time. The host spends "
                f"most of a step ({share:.0%}) in the phase `{longest}`.",
                evidence={"busy": _busy(content), "longest": longest},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the device could not be checked, or None."""
        return _why_no_profile(scene)


def _busy(content: Mapping[str, Any]) -> float:
    total = sum(step["total"] for step in content["steps"])
    return sum(step["busy"] for step in content["steps"]) / total if total > 0 else 1.0
