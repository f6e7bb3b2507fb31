"""Collection of small PyTorch trainings.  python cases.py --plain [--only GLOB]"""
import argparse
import fnmatch
import importlib
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch  # noqa: E402

from common import CASES, case  # noqa: E402,F401

MODULES = ["m_seq", "m_tab", "m_graph", "m_rl", "m_img", "m_gen", "m_rep", "m_ft", "m_num", "m_mix"]
for _m in MODULES:
    importlib.import_module(_m)

if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--plain", action="store_true")
    ap.add_argument("--only", default="*")
    a = ap.parse_args()
    for name in sorted(CASES):
        if not fnmatch.fnmatch(name, a.only):
            continue
        t, c = time.time(), time.process_time()
        try:
            q = "%.4f" % CASES[name](lambda n, v: None)
        except Exception as e:  # a training may crash
            q = "%s: %s" % (type(e).__name__, e)
        print("%-8s %s   (%.1f s wall, %.1f s cpu)" % (name, q, time.time() - t, time.process_time() - c), flush=True)
