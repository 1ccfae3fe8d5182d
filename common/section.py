"""How a setting is declared, in config.py for the core and in extensions/settings.py for the extensions."""

from functools import partial
from typing import Any, ClassVar, Optional

from pydantic import BaseModel, ConfigDict, Field

MAX_NUMBER = 2**53  # larger numbers are typos, and JSON would round them


def setting(on_resume: str, default, meaning: str, **limits):
    """Return a field with a help text and its behavior on resume. Every number has an upper limit.

    `separator` divides several values, which may be a list in JSON and YAML.
    """
    if limits and not {"lt", "le", "min_length", "separator", "union_mode"} & set(limits):
        limits["le"] = MAX_NUMBER
    extra = {"on_resume": on_resume, "times": limits.pop("times", None),
             "separator": limits.pop("separator", None)}
    return Field(default, description=meaning, json_schema_extra=extra, **limits)


# What a resumed run does with another value. Safe settings come from flags, files and presets as in a new
# run, and a note reports a change. The others come from the run's record, unless a flag changes them: a curve
# setting with a warning, and a fixed one is an error, unless ALLOW_RESUME_MISMATCH lists it. `by_content` is
# for paths and shapes with several spellings: what they stand for is compared.
safe, curve, fixed, by_content = (partial(setting, kind) for kind in ("safe", "curve", "fixed", "content"))


def interval(times: int, most: int, meaning: str):
    """Return a field for the steps between two events; plan/derived.py divides MAX_STEPS by `times`."""
    return safe(most, f"steps between {meaning}; default: MAX_STEPS / {times}, at most {most}", ge=0,
                times=times)


class Section(BaseModel):
    """A group of settings; frozen, so that the logged values are those in use."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False,
                              hide_input_in_errors=True, defer_build=True)

    # The setting and its value without which the others have no effect; then a resumed run may change them.
    used_if: ClassVar[Optional[tuple[str, Any]]] = None
