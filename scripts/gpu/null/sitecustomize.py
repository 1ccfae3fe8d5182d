"""What a GPU would have computed, where Paddock reads it: on the null GPU, results are zeros, or what memory held before.

Python imports this file at its start if its folder is in PYTHONPATH. It changes some functions when their module is imported.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec

TOKEN = 5  # what a model writes


def attention(module) -> None:
    """A kernel passes its trial if it runs."""
    run = module.trial
    module.trial = lambda *arguments: None if (why := run(*arguments)) and why.startswith("its result is off") else why


def model_utils(module) -> None:
    compile_one = module.why_no_kernel
    module.why_no_kernel = lambda device: None if (why := compile_one(device)) and "its results are wrong" in why else why


def engine(module) -> None:
    take = module.Request.take
    module.Request.take = lambda self, token: take(self, TOKEN)


def ranks(module) -> None:
    """All scalars are 1, but those of a step that stop, skip or repeat it are 0."""
    read = module.Ranks.tolist

    def tolist(self, tensor):
        frame, values = sys._getframe(1), read(self, tensor)  # the host waits here
        if tensor.ndim > 1:
            return [[1.0] * tensor.shape[1] for _ in values]
        values = [1.0] * len(values)
        if frame.f_code.co_name == "train_step":
            import torch

            saving = frame.f_locals["run"].saving
            first = len(frame.f_locals["means"])
            values[first:first + 7] = [1.0, 1.0, 1.0, 0.0, float(saving is not None and saving.is_done), 0.0, 0.0]
            print(f"NULL peak {torch.cuda.max_memory_allocated()} reserved {torch.cuda.memory_reserved()}", flush=True)
        return values

    module.Ranks.tolist = tolist


CHANGES = {"model_kernels.attention": attention, "model_utils": model_utils, "extensions.inference.engine": engine,
           "parallel.ranks": ranks}


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
