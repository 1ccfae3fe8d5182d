"""Replace what a device would have computed, where Paddock reads it: the null GPU leaves zeros or old values.

Python imports this file at its start, because `run` (build.sh) has its folder in PYTHONPATH. It changes
functions of a module after the module's import.
"""

import ctypes
import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.util import find_spec

TOKEN = 5  # what a model writes
LAST_STEP = int(os.environ.get("NULL_STEPS", -1))  # a run ends after it
TAKEN = [0]  # bytes that compiled kernels have read or written


def attention(module) -> None:
    """Let a kernel pass its trial if it runs."""
    run = module.trial

    def trial(*arguments):
        reason = run(*arguments)
        return None if reason and reason.startswith("its result is off") else reason

    module.trial = trial


def model_utils(module) -> None:
    """Let the compiler pass its trial if a kernel compiles."""
    compile_one = module.why_no_kernel

    def why_no_kernel(device_type):
        reason = compile_one(device_type)
        return None if reason and "its results are wrong" in reason else reason

    module.why_no_kernel = why_no_kernel


def engine(module) -> None:
    take = module.Request.take
    module.Request.take = lambda self, token: take(self, TOKEN)


def ranks(module) -> None:
    """Set all scalars to 1, but to 0 those of a step that would stop, skip or repeat it."""
    read = module.Ranks.tolist

    def tolist(self, tensor):
        values = read(self, tensor)  # the host waits here
        if tensor.ndim > 1:
            return [[1.0] * len(row) for row in values]
        frame = sys._getframe(1)
        if frame.f_code.co_name == "all_agree":  # copies and sums over ranks are real
            return values
        values = [1.0] * len(values)
        if frame.f_code.co_name == "train_step":
            import torch

            run, first = frame.f_locals["run"], len(frame.f_locals["means"])
            names = frame.f_globals["StepNumbers"]._fields
            numbers = {"units": 1.0, "norm": 1.0, "norm_sum": 1.0,
                       "written_ranks": float(run.has_written)}
            values[first:first + len(names)] = [numbers.get(name, 0.0) for name in names]
            peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
            launches = ctypes.c_long.in_dll(ctypes.CDLL("libcuda.so.1"), "null_launches").value
            print(f"NULL peak {peak} reserved {reserved} launches {launches} bytes {TAKEN[0]} "
                  f"us {time.perf_counter_ns() // 1000}", flush=True)
            if run.progress.step + 1 == LAST_STEP:
                os._exit(0)  # without a save: the host may have too little memory for the weights
        return values

    module.Ranks.tolist = tolist


def objectives(module) -> None:
    """Read 1 where the host reads NaN: old bytes of the device's memory."""
    read = module.Tensor.tolist
    module.Tensor.tolist = lambda self: read(
        self.cpu().nan_to_num(1.0) if self.is_cuda and self.is_floating_point() else self)


def compiled_kernels(module) -> None:
    """Add up the bytes of the tensors that compiled kernels take: of most, each is read or written once."""
    start = module.CachingAutotuner.run

    def run(self, *arguments, **others):
        TAKEN[0] += sum(getattr(each, "nbytes", 0) for each in arguments)
        return start(self, *arguments, **others)

    module.CachingAutotuner.run = run


CHANGES = {"learn.objectives": objectives, "model_kernels.attention": attention, "model_utils": model_utils,
           "extensions.inference.engine": engine, "parallel.ranks": ranks,
           "torch._inductor.runtime.triton_heuristics": compiled_kernels}


class Changed(MetaPathFinder):
    """Finds these modules as others do, and changes them after their import."""

    def find_spec(self, name, path=None, target=None):
        change = CHANGES.pop(name, None)
        if change is None or (spec := find_spec(name)) is None:
            return None
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), change(module))
        return spec


sys.meta_path.insert(0, Changed())
