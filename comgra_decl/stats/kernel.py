"""A compiled single-pass kernel for raw sums on the CPU.

Each torch reduction reads its tensor separately. The eight raw sums would need eight reads, which
cost five to ten times as much as one. Here, a single vectorised loop computes all of them. It is
written in LLVM assembly and compiled in memory by llvmlite on first use, which takes a fraction of
a second and needs no compiler or files. If llvmlite is missing or fails, there is no kernel, and
the recipes in `sums` compute the same results with torch's operations.

The pivot of a row is the mean of its first 4096 elements. Every 512 elements, the sums in a
vector's lanes are added to float64 lanes, so that rounding errors do not grow with the row. A row
is unreliable if a sum is NaN or infinite, or if the spread is so small that its squares underflow.
Such rows are marked by -1 in the NONFINITE column and counted in the result.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from string import Template

import torch

Kernel = Callable[[int, int, int, int], int]
"""(address of rows, number of rows, elements per row, address of float64 [rows, 8]) -> marked."""


@dataclass(frozen=True)
class _Type:
    """Memory format of the numbers, and precision and number of the lanes that sum them."""

    name: str
    stored: str
    number: str
    lanes: int
    largest: float  # larger sums of squares are unreliable
    smallest: float  # smaller spreads are unreliable, except 0


_TYPES = {
    torch.float32: _Type("rows_float", "float", "float", 16, 3e38, 1e-16),
    torch.bfloat16: _Type("rows_bfloat", "i16", "float", 16, 3e38, 1e-16),
    torch.float64: _Type("rows_double", "double", "double", 8, 1e308, 1e-150),
}

_TEMPLATE = """
declare $F @llvm.vector.reduce.fadd.v$W$S($F, <$W x $F>)
declare $F @llvm.vector.reduce.fmin.v$W$S(<$W x $F>)
declare $F @llvm.vector.reduce.fmax.v$W$S(<$W x $F>)
$wide
declare i32 @llvm.vector.reduce.add.v${W}i32(<$W x i32>)
declare <$W x $F> @llvm.fabs.v$W$S(<$W x $F>)
declare $F @llvm.fabs.$S($F)
declare i64 @llvm.smin.i64(i64, i64)

define i64 @$name(ptr noalias %x, i64 %rows, i64 %n, ptr noalias %out) {
entry:
  %whole = and i64 %n, -$W
  %first = call i64 @llvm.smin.i64(i64 %n, i64 4096)
  %first.whole = and i64 %first, -$W
  %first.number = sitofp i64 %first to $F
  %any = icmp sgt i64 %rows, 0
  br i1 %any, label %row, label %exit

row:
  %r = phi i64 [ 0, %entry ], [ %r.next, %end ]
  %marked = phi i64 [ 0, %entry ], [ %marked.next, %end ]
  %begin = mul i64 %r, %n
  %data = getelementptr $E, ptr %x, i64 %begin
  br label %mean

mean:
  %mi = phi i64 [ 0, %row ], [ %mi.next, %mean.body ]
  %ms = phi <$W x $F> [ zeroinitializer, %row ], [ %ms.next, %mean.body ]
  %mi.more = icmp slt i64 %mi, %first.whole
  br i1 %mi.more, label %mean.body, label %mean.lanes
mean.body:
  @vector(mt, mi)
  %ms.next = fadd <$W x $F> %ms, %mt
  %mi.next = add nuw nsw i64 %mi, $W
  br label %mean
mean.lanes:
  %ms.sum = call reassoc $F @llvm.vector.reduce.fadd.v$W$S($F 0.0, <$W x $F> %ms)
  br label %mean.tail
mean.tail:
  %mj = phi i64 [ %first.whole, %mean.lanes ], [ %mj.next, %mean.tail.body ]
  %mu = phi $F [ %ms.sum, %mean.lanes ], [ %mu.next, %mean.tail.body ]
  %mj.more = icmp slt i64 %mj, %first
  br i1 %mj.more, label %mean.tail.body, label %pivot
mean.tail.body:
  @scalar(mv, mj)
  %mu.next = fadd $F %mu, %mv
  %mj.next = add nuw nsw i64 %mj, 1
  br label %mean.tail

pivot:
  %mean.any = fdiv $F %mu, %first.number
  %mean.zero = fsub $F %mean.any, %mean.any
  %mean.finite = fcmp oeq $F %mean.zero, 0.0
  %p = select i1 %mean.finite, $F %mean.any, $F 0.0
  %p.one = insertelement <$W x $F> poison, $F %p, i32 0
  %p.all = shufflevector <$W x $F> %p.one, <$W x $F> poison, <$W x i32> zeroinitializer
  %inf.one = insertelement <$W x $F> poison, $F $infinity, i32 0
  %inf.all = shufflevector <$W x $F> %inf.one, <$W x $F> poison, <$W x i32> zeroinitializer
  %ninf.all = fneg <$W x $F> %inf.all
  br label %block

block:
  %bi = phi i64 [ 0, %pivot ], [ %stop, %block.lanes ]
  %sum.v = phi <$W x double> [ zeroinitializer, %pivot ], [ %sum.next, %block.lanes ]
  %squares.v = phi <$W x double> [ zeroinitializer, %pivot ], [ %squares.next, %block.lanes ]
  %absolute.v = phi <$W x double> [ zeroinitializer, %pivot ], [ %absolute.next, %block.lanes ]
  %nonzero.v = phi <$W x i32> [ zeroinitializer, %pivot ], [ %z, %block.lanes ]
  %low.v = phi <$W x $F> [ %inf.all, %pivot ], [ %low, %block.lanes ]
  %high.v = phi <$W x $F> [ %ninf.all, %pivot ], [ %high, %block.lanes ]
  %bi.more = icmp slt i64 %bi, %whole
  br i1 %bi.more, label %block.enter, label %lanes
block.enter:
  %stop.any = add nuw nsw i64 %bi, 512
  %stop = call i64 @llvm.smin.i64(i64 %stop.any, i64 %whole)
  br label %vectors

vectors:
  %i = phi i64 [ %bi, %block.enter ], [ %i.next, %vectors.body ]
  %s = phi <$W x $F> [ zeroinitializer, %block.enter ], [ %s.next, %vectors.body ]
  %q = phi <$W x $F> [ zeroinitializer, %block.enter ], [ %q.next, %vectors.body ]
  %a = phi <$W x $F> [ zeroinitializer, %block.enter ], [ %a.next, %vectors.body ]
  %z = phi <$W x i32> [ %nonzero.v, %block.enter ], [ %z.next, %vectors.body ]
  %low = phi <$W x $F> [ %low.v, %block.enter ], [ %low.next, %vectors.body ]
  %high = phi <$W x $F> [ %high.v, %block.enter ], [ %high.next, %vectors.body ]
  %i.more = icmp slt i64 %i, %stop
  br i1 %i.more, label %vectors.body, label %block.lanes
vectors.body:
  @vector(t, i)
  %c = fsub <$W x $F> %t, %p.all
  %s.next = fadd <$W x $F> %s, %c
  %c.square = fmul contract <$W x $F> %c, %c
  %q.next = fadd contract <$W x $F> %q, %c.square
  %t.abs = call <$W x $F> @llvm.fabs.v$W$S(<$W x $F> %t)
  %a.next = fadd <$W x $F> %a, %t.abs
  %t.low = fcmp olt <$W x $F> %t, %low
  %low.next = select <$W x i1> %t.low, <$W x $F> %t, <$W x $F> %low
  %t.high = fcmp ogt <$W x $F> %t, %high
  %high.next = select <$W x i1> %t.high, <$W x $F> %t, <$W x $F> %high
  %t.nonzero = fcmp une <$W x $F> %t, zeroinitializer
  %t.one = zext <$W x i1> %t.nonzero to <$W x i32>
  %z.next = add <$W x i32> %z, %t.one
  %i.next = add nuw nsw i64 %i, $W
  br label %vectors

block.lanes:
  @widen_lanes(s.wide, s)
  @widen_lanes(q.wide, q)
  @widen_lanes(a.wide, a)
  %sum.next = fadd <$W x double> %sum.v, %s.wide
  %squares.next = fadd <$W x double> %squares.v, %q.wide
  %absolute.next = fadd <$W x double> %absolute.v, %a.wide
  br label %block

lanes:
  %sum = call reassoc double @llvm.vector.reduce.fadd.v${W}f64(double 0.0, <$W x double> %sum.v)
  %squares = call reassoc double
    @llvm.vector.reduce.fadd.v${W}f64(double 0.0, <$W x double> %squares.v)
  %absolute = call reassoc double
    @llvm.vector.reduce.fadd.v${W}f64(double 0.0, <$W x double> %absolute.v)
  %nonzero.sum = call i32 @llvm.vector.reduce.add.v${W}i32(<$W x i32> %nonzero.v)
  %nonzero = zext i32 %nonzero.sum to i64
  %low.all = call nnan $F @llvm.vector.reduce.fmin.v$W$S(<$W x $F> %low.v)
  %high.all = call nnan $F @llvm.vector.reduce.fmax.v$W$S(<$W x $F> %high.v)
  br label %tail

tail:
  %j = phi i64 [ %whole, %lanes ], [ %j.next, %tail.body ]
  %sum.t = phi double [ %sum, %lanes ], [ %sum.u, %tail.body ]
  %squares.t = phi double [ %squares, %lanes ], [ %squares.u, %tail.body ]
  %absolute.t = phi double [ %absolute, %lanes ], [ %absolute.u, %tail.body ]
  %nonzero.t = phi i64 [ %nonzero, %lanes ], [ %nonzero.u, %tail.body ]
  %low.t = phi $F [ %low.all, %lanes ], [ %low.u, %tail.body ]
  %high.t = phi $F [ %high.all, %lanes ], [ %high.u, %tail.body ]
  %j.more = icmp slt i64 %j, %n
  br i1 %j.more, label %tail.body, label %end
tail.body:
  @scalar(u, j)
  %d = fsub $F %u, %p
  @widen(d.wide, d)
  %sum.u = fadd double %sum.t, %d.wide
  %d.square = fmul double %d.wide, %d.wide
  %squares.u = fadd double %squares.t, %d.square
  %u.abs = call $F @llvm.fabs.$S($F %u)
  @widen(u.wide, u.abs)
  %absolute.u = fadd double %absolute.t, %u.wide
  %u.nonzero = fcmp une $F %u, 0.0
  %u.one = zext i1 %u.nonzero to i64
  %nonzero.u = add i64 %nonzero.t, %u.one
  %u.low = fcmp olt $F %u, %low.t
  %low.u = select i1 %u.low, $F %u, $F %low.t
  %u.high = fcmp ogt $F %u, %high.t
  %high.u = select i1 %u.high, $F %u, $F %high.t
  %j.next = add nuw nsw i64 %j, 1
  br label %tail

end:
  @widen(p.wide, p)
  @widen(low.wide, low.t)
  @widen(high.wide, high.t)
  %nonzero.wide = sitofp i64 %nonzero.t to double
  %size = fadd double %squares.t, %absolute.t
  %size.held = fcmp olt double %size, $largest
  %spread = fsub double %high.wide, %low.wide
  %spread.wide = fcmp ogt double %spread, $smallest
  %spread.none = fcmp oeq double %spread, 0.0
  %spread.held = or i1 %spread.wide, %spread.none
  %held = and i1 %size.held, %spread.held
  %mark = select i1 %held, double 0.0, double -1.0
  %mark.one = select i1 %held, i64 0, i64 1
  %marked.next = add i64 %marked, %mark.one
  %place = getelementptr [8 x double], ptr %out, i64 %r
  @store(0, p.wide)
  @store(1, sum.t)
  @store(2, squares.t)
  @store(3, absolute.t)
  @store(4, low.wide)
  @store(5, high.wide)
  @store(6, nonzero.wide)
  @store(7, mark)
  %r.next = add nuw nsw i64 %r, 1
  %more = icmp slt i64 %r.next, %rows
  br i1 %more, label %row, label %exit

exit:
  %result = phi i64 [ 0, %entry ], [ %marked.next, %end ]
  ret i64 %result
}
"""


def _load(kind: _Type, name: str, index: str, vector: bool) -> str:
    """Return instructions that load numbers into `%name`."""

    def many(scalar: str) -> str:
        return f"<{kind.lanes} x {scalar}>" if vector else scalar

    place = f"  %{name}.at = getelementptr {kind.stored}, ptr %data, i64 %{index}\n"
    if kind.stored == kind.number:
        align = 4 if kind.number == "float" else 8
        return place + f"  %{name} = load {many(kind.number)}, ptr %{name}.at, align {align}"
    # bfloat16 is the upper half of a float32
    upper = f"<{', '.join(['i32 16'] * kind.lanes)}>" if vector else "16"
    return place + (
        f"  %{name}.half = load {many('i16')}, ptr %{name}.at, align 2\n"
        f"  %{name}.bits = zext {many('i16')} %{name}.half to {many('i32')}\n"
        f"  %{name}.raised = shl {many('i32')} %{name}.bits, {upper}\n"
        f"  %{name} = bitcast {many('i32')} %{name}.raised to {many('float')}"
    )


def _widen(kind: _Type, name: str, value: str, vector: bool = False) -> str:
    """Return instructions that convert numbers to double."""
    number, wide = kind.number, "double"
    if vector:
        number, wide = f"<{kind.lanes} x {number}>", f"<{kind.lanes} x double>"
    if kind.number == "double":
        return f"  %{name} = bitcast {wide} %{value} to {wide}"
    return f"  %{name} = fpext {number} %{value} to {wide}"


def _store(column: str, value: str) -> str:
    return (
        f"  %to.{column} = getelementptr double, ptr %place, i64 {column}\n"
        f"  store double %{value}, ptr %to.{column}, align 8"
    )


def constant(value: float) -> str:
    """Return a double in LLVM's lossless notation."""
    return "0x" + struct.pack(">d", value).hex().upper()


def _assembly(kind: _Type) -> str:
    """Return the LLVM assembly for one type's kernel."""
    macros: dict[str, Callable[[str, str], str]] = {
        "vector": lambda name, index: _load(kind, name, index, vector=True),
        "scalar": lambda name, index: _load(kind, name, index, vector=False),
        "widen": lambda name, value: _widen(kind, name, value),
        "widen_lanes": lambda name, value: _widen(kind, name, value, vector=True),
        "store": _store,
    }
    text = re.sub(
        r"^  @(\w+)\(([\w.]+), ([\w.]+)\)$",
        lambda match: macros[match[1]](match[2], match[3]),
        _TEMPLATE,
        flags=re.MULTILINE,
    )
    wide = "declare double @llvm.vector.reduce.fadd.v16f64(double, <16 x double>)"
    return Template(text).substitute(
        name=kind.name,
        wide=wide if kind.number == "float" else "",
        W=kind.lanes,
        E=kind.stored,
        F=kind.number,
        S="f32" if kind.number == "float" else "f64",
        infinity=constant(float("inf")),
        largest=constant(kind.largest),
        smallest=constant(kind.smallest),
    )


@cache
def kernel_for(dtype: torch.dtype) -> Kernel | None:
    """Return the kernel for `dtype`, compiled on the first call; None if unavailable."""
    kind = _TYPES.get(dtype)
    if kind is None:
        return None
    try:
        return _compile(kind)
    except Exception:  # noqa: BLE001 - a compiler can fail in any way; others are used
        return None


def _compile(kind: _Type) -> Kernel:
    i64, pointer = ctypes.c_int64, ctypes.c_void_p
    signature = ctypes.CFUNCTYPE(i64, pointer, i64, i64, pointer)
    kernel: Kernel = signature(address_of(_assembly(kind), kind.name))
    return kernel


def address_of(assembly: str, name: str) -> int:
    """Compile LLVM assembly for this machine and return a function's address.

    Raises:
        Exception: any error raised by llvmlite; `ImportError` if it is missing.
    """
    import llvmlite.binding as llvm  # type: ignore[import-untyped]

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        jit=True,
    )
    module = llvm.parse_assembly(assembly)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    address: int = engine.get_function_address(name)
    engine.detach()  # keep the code until the process ends, since threads may still run it
    return address
