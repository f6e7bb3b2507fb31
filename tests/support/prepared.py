"""What each forked program would otherwise do again: import all rules, compile the host's kernel.

Imported last by the process that forks programs, which then sets its objects aside: programs need
not look through them, and the kernel need not copy their memory when they are collected.
"""

from __future__ import annotations

import torch

from comgra_decl.rules.catalogue import known
from comgra_decl.spec import load_spec
from comgra_decl.stats.kernel import kernel_for
from tests.support import freezing

known()
load_spec("debug")
kernel_for(torch.float32)
freezing.set_aside()
